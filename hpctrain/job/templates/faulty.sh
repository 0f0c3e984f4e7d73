# After repeated silent faults, the run stops (75) and names the nodes.
faulty=$("${hpctrain[@]}" status --faulty @{faulty_dir}) || faulty=""
if [ "$code" -eq 75 ] && [ -n "$faulty" ]; then
    echo "silent faults on $faulty: this script cannot exclude nodes; test them" >&2
fi

