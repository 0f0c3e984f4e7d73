# Where silent faults came again and again, the run stops (75) and names the nodes.
faulty=$("${hpctrain[@]}" status --faulty @{faulty_dir}) || faulty=""
if [ "$code" -eq 75 ] && [ -n "$faulty" ]; then
    echo "silent faults on $faulty: this scheduler is told of no nodes to leave out; have these tested" >&2
fi

