# Sourced by the scripts beside it: enters the virtual environment of this checkout, made on first use, with torch.
#
#   FOSCAR_VENV   where it is (default: .venv in the checkout)
#   PYTHON        what to make it with (default: python3)
#
# A torch that is already installed is used as it is: a GPU machine's own build is neither replaced nor downloaded again.

set -eu
cd "$(dirname -- "$0")/.."
venv=${FOSCAR_VENV:-$PWD/.venv}
base=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

has_torch() {
    "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9))' 2>/dev/null
}

has_gpu() {
    nvidia-smi -L >/dev/null 2>&1
}

if [ ! -x "$venv/bin/python" ]; then
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "FOSCAR needs Python 3.10 or later, $base is $("$base" --version 2>&1)" >&2
        exit 1
    }
    if has_torch "$base"; then
        "$base" -m venv --system-site-packages "$venv"
    else
        "$base" -m venv "$venv"
    fi
fi
python=$venv/bin/python
if ! has_torch "$python"; then
    # Before the project, so that its own requirement draws nothing: without a GPU the CPU build of a pinned version,
    # which pip prefers wherever an index or find-links offers it (versions ending in +cpu).
    if has_gpu; then
        "$python" -m pip install -q "torch>=2.9"
    else
        "$python" -m pip install -q "torch==2.13.0"
    fi
fi
