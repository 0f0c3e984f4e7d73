#!/usr/bin/env bash
# What Dockerfile and hpctrain.def have in common: run as root inside of the image, from the folder with hpctrain's
# files, it installs Debian's packages and then hpctrain in .venv beside them. What it reads from the environment:
#   TORCH_INDEX  extra package index for torch (auto: install.sh chooses; empty: only those that pip is configured with)
#   GPU          build of torch: cuda, rocm or xpu; empty: for CPUs
#   EXTRAS       extras of pyproject.toml: test, bench
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

# ssh is how Open MPI's mpirun reaches other containers, where no batch system starts them.
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
    ca-certificates openssh-client openssh-server \
    gcc g++ python3 python3-dev python3-venv \
    openmpi-bin libopenmpi-dev libpmix-dev libhdf5-openmpi-dev
rm -rf /var/lib/apt/lists/*
mkdir -p /run/sshd
printf 'Host *\n    StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    LogLevel ERROR\n' \
    >/etc/ssh/ssh_config.d/mpi.conf
printf 'StrictModes no\nUsePAM no\n' >/etc/ssh/sshd_config.d/mpi.conf

# Apptainer shows the host's /tmp while it builds: nothing there may be taken for ours.
TMPDIR=$(mktemp -d)
trap 'rm -rf "$TMPDIR"' EXIT
export TMPDIR XDG_CACHE_HOME=$TMPDIR/cache PIP_NO_CACHE_DIR=1
if [ "${TORCH_INDEX-auto}" = auto ]; then unset TORCH_INDEX; fi
EXTRAS=${EXTRAS-} FETCH=no VENV=$PWD/.venv containers/install.sh

# Whoever runs the image reads it, also where the files came from a folder that was their owner's alone.
chmod -R a+rX .
