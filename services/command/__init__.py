"""The `hotset` command: serve, store, chat, bench, plan, doctor."""
