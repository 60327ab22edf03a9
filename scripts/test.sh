#!/bin/sh
# Sets up a virtual environment and runs the linter and the tests in it; arguments go to pytest.
. "$(dirname -- "$0")/venv.sh"
"$python" -m pip install -q -e ".[dev]"
"$python" -m ruff check .
exec "$python" -m pytest -n 2 "$@"
