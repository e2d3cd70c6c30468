# What the scripts of the examples with tools share, beside common.sh. Without a model of the user's, a tiny random one
# is first shown some conversations with the tool (supervised fine-tuning).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Sets `checkpoint` to a model that has seen the tool.
warm_up() {
    [[ -n $checkpoint ]] && return
    local name=$run_name-warm-up
    local command=("$PYTHON" train.py --config examples/tool_warm_up.yaml --device cpu --hf-checkpoint "$data/tiny"
        --prompt-data "$data/demonstrations.jsonl" --save-hf "$data/warm" --outputs-dir "$outputs" --run-name "$name")
    echo "running: ${command[*]}"
    "${command[@]}" || fail "the warm-up ended with the status $?: the reason is above, all logs are in $outputs/$name"
    checkpoint=$data/warm
}
