# Exit codes: 0 is done, 75 is stopped and can be resumed; 2, 3, 126 and 127 are errors that the user must correct.
# Any other code is a fault or a lost node. The job starts again after up to five of them in a row.
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
        echo "exit code $code, after earlier faults (see $faults): not started again" >&2
        exit "$code"
    fi
    ;;
esac
@{resubmit}
exit "$code"
