#!/bin/sh
# Runs the decoder with the checkpoint that HOTSET_MODEL names, or else the bundled model, fetched once into /cache.
set -eu
if [ -z "${HOTSET_MODEL:-}" ]; then
  HOTSET_MODEL=$(python -m services.decoder.models.bundled)
  export HOTSET_MODEL
fi
exec python -m services.decoder "$@"
