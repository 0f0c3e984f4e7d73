#!/usr/bin/env bash
# packages.sh WHAT PROGRAM=PACKAGE...: installs the packages whose programs are missing, where apt may; says so, and
# goes on, where it may not: the tests of WHAT then skip. No service is started, and one that was running stays so.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=$PATH:/usr/sbin:/sbin

what=$1 packages=()
shift
say() { echo "$what: $*"; }
for each; do
    command -v "${each%%=*}" >/dev/null || packages+=("${each#*=}")
done
[ ${#packages[@]} -gt 0 ] || exit 0
mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
if [ "$(id -u)" != 0 ] || [ "${FETCH:-yes}" = no ] || ! command -v apt-get >/dev/null; then
    say "not installing ${packages[*]}: that needs root, apt, and FETCH other than no"
    exit 0
fi
say "installing ${packages[*]}"
# Debian's way to install a service without starting it.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f $policy' EXIT
fi
quiet=(-o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -qq)
fetch() { apt-get "${quiet[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null 2>&1; }
fetch || { apt-get "${quiet[@]}" update >/dev/null 2>&1 && fetch; } || say "apt could not install ${packages[*]}"
