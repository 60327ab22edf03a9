#!/bin/sh
# Sets up a virtual environment and runs the main job (examples/quickstart.py) in it.
. "$(dirname -- "$0")/venv.sh"
if has_gpu; then
    "$python" -m pip install -q -e ".[jit,gpu]"
else
    "$python" -m pip install -q -e .
fi
exec "$python" examples/quickstart.py "$@"
