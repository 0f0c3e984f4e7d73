# A batch shell may not have defined the module command.
# shellcheck disable=SC1091
if ! command -v module >/dev/null; then . /etc/profile; fi
module load @{modules} || exit 2
