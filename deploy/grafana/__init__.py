"""Grafana's dashboards as data, and the generator that writes them as Grafana's JSON: `make dashboards`."""
