#!/bin/sh
# Makes the environment of `pytest -m upstream`: tests/upstream/make_environment.sh FOLDER
# FOLDER/venv: a Python with upstream's requirements. FOLDER/0.22.1, FOLDER/0.23.0: vllm and vllm-ascend, unmodified.
# vllm is built from its source distribution for no device at all, which leaves out its CUDA libraries (0.5 GB a release).
set -eu
folder=$1
here=$(dirname "$0")
"${PYTHON:-python3}" -m venv "$folder/venv"
install() {
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check -c "$here/constraints.txt" "$@"
}
echo "upstream's requirements"
install -e "$here/../..[upstream]"
# Without their own requirements, which would bring CUDA and Ascend packages.
install --no-deps xgrammar torchvision
release() {
    echo "vllm $1, vllm-ascend $2"
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$1 \
        install --no-deps --no-binary vllm --no-build-isolation --target "$folder/$1" "vllm==$1"
    install --no-deps --target "$folder/$1" "vllm-ascend==$2"
}
release 0.22.1 0.22.1rc1
release 0.23.0 0.23.0
echo "NPUSIM_UPSTREAM_ENV=$folder pytest -m upstream"
