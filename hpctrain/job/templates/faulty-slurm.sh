# After repeated silent faults, the run stops (75) and names the nodes.
faulty=$("${hpctrain[@]}" status --faulty @{faulty_dir}) || faulty=""
if [ "$code" -eq 75 ] && [ -n "$faulty" ]; then
    echo "exit code 75: submitted again without $faulty because of silent faults"
    sbatch@{array_task} --exclude="$faulty" @{file}
    exit
fi

