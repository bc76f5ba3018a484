#!/usr/bin/env bash
# Makes the virtual environment FOLDER with the packages of a requirements file, for the CPU:
#     requirements/install.sh requirements/onedl.txt FOLDER
# Run again, it keeps what is there and does what an interrupted run left undone. FOLDER/ready says
# that all of it is there.
set -euo pipefail
requirements=$1 venv=$2
export CUDA_VISIBLE_DEVICES=  # on a machine with a GPU, mmcv would otherwise ask for CUDA's compiler

fail() { echo "error: $*" >&2; exit 1; }

for python in python3.11 python3 python ''; do
    [ -n "$python" ] || fail 'Python 3.11 is needed and is not on the PATH (with another version and your own packages: make PYTHON=/path/to/python ...)'
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && break
done
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; on Debian and Ubuntu: apt install python3.11-venv"
"$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    fail "$python lacks the header files that compiling mmcv needs; on Debian and Ubuntu: apt install python3.11-dev"
command -v "${CXX:-c++}" >/dev/null ||
    fail "a C++ compiler is needed to compile mmcv, and ${CXX:-c++} is not on the PATH; on Debian and Ubuntu: apt install g++"

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
python=$(cd "$venv" && pwd)/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

echo "Installing $requirements into $venv. PyTorch may come as its CUDA build, several GB."
grep -v 'mmcv==' "$requirements" | pip install -r /dev/stdin

# mmcv only works with the torch it was compiled against, so it is compiled here and never comes
# from a cache of wheels.
mmcv=$(grep -o '^[a-z-]*mmcv==.*' "$requirements")
built="$mmcv for torch $("$python" -c 'import torch; print(torch.__version__)')"
if [ "$(cat "$venv/mmcv-built" 2>/dev/null)" != "$built" ]; then
    source=$venv/mmcv-source log=$venv/mmcv-build.log
    rm -rf "$source" "$venv/mmcv-built"
    mkdir "$source"
    pip download --no-deps --no-binary :all: --no-build-isolation --no-cache-dir -d "$source" "$mmcv"
    tar -xzf "$source"/*.tar.gz -C "$source" --strip-components 1
    # It asks for C++17, too old for newer torch headers. Torch's own build step adds what they need.
    sed -i.bak "s/'-std=c++17'//" "$source/setup.py"
    echo "Compiling $mmcv, about 10 minutes on 2 cores; the whole log is in $log"
    # The environment's ninja comes first: one elsewhere on the PATH may be too old to tell the time left.
    PATH=$(dirname "$python"):$PATH MAX_JOBS=${MAX_JOBS:-$(getconf _NPROCESSORS_ONLN)} \
        NINJA_STATUS='[%f/%t files, about %W left] ' \
        "$python" -m pip install -v --no-deps --no-build-isolation --no-cache-dir --force-reinstall "$source" 2>&1 |
        tee "$log" | { grep --line-buffered -oE '^ *\[[0-9]+/[0-9]+ files[^]]*\]' || true; } ||
        { grep -E '(error|fatal):? ' "$log" | head -n 20 || true; tail -n 20 "$log"
          fail "mmcv did not compile; the errors in $log and its last lines are above"; }
    echo "$built" > "$venv/mmcv-built"
    rm -rf "$source"
fi

# Some packages require opencv-python, which needs libGL, and others the headless build, which does
# not: both install the same files, and the last one wins.
pip install -q --no-deps --force-reinstall "$(grep opencv-python-headless "$requirements")"
"$python" -c 'import mmcv.ops, mmdet.models, mmseg.models, mmpretrain.models' ||
    fail "the environment does not work (see above); remove $venv and try again"
touch "$venv/ready"
