# 75: stopped in good order, to be gone on with. 0 is done; 2, 3, 126 and 127 are for somebody to look at.
# All else is a fault or a lost node; a sixth one in a row is the last.
faults=@{faults}
case $code in
75) rm -f "$faults" ;;
0 | 2 | 3 | 126 | 127)
    rm -f "$faults"
    exit "$code"
    ;;
*)
    echo "exit code $code on $(hostname), $(date)" >>"$faults"
    if [ "$(wc -l <"$faults")" -gt 5 ]; then
        echo "exit code $code, and as bad before (see $faults): not started again" >&2
        exit "$code"
    fi
    ;;
esac
@{again}
exit "$code"
