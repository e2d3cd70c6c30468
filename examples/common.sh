# What the scripts of the examples share. Each sets NAME, its folder, and calls `example "$@"`, or its steps one by one:
# `options`, `make_task`, `train`, `report`. It may define its own
#   files     sets FILES, what train.py is given of the data in $data
#   ENTRY     train_async.py in the place of train.py
#   LAUNCH    the words of a command that runs it
#   report    shows what the run in $1 came to
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTHON=${PYTHON:-.venv/bin/python}
export HF_HUB_OFFLINE=1

example() {
    options "$@"
    make_task
    train "$run_name"
    echo
    report "$outputs/$run_name"
}

# Reads the options of all examples; the others are for train.py.
options() {
    outputs=outputs run_name=${NAME//_/-} checkpoint="" tiny="" passed=()
    while (($#)); do
        case $1 in
            -h | --help) usage && exit ;;
            --cpu) tiny=1 && passed+=(--device cpu) ;;
            --hf-checkpoint | --outputs-dir | --run-name)
                (($# > 1)) || fail "$1 needs a value"
                case $1 in
                    --hf-checkpoint) checkpoint=$2 ;;
                    --outputs-dir) outputs=$2 ;;
                    --run-name) run_name=$2 ;;
                esac
                shift
                ;;
            *) passed+=("$1") ;;
        esac
        shift
    done
    [[ -n $checkpoint || -n $tiny ]] || fail "give --cpu, or a model with --hf-checkpoint DIR"
    data=$outputs/${NAME//_/-}-data
}

# Without a model of the user's, a tiny one is made beside the data.
make_task() {
    local model=()
    [[ -n $checkpoint ]] || model=(--tiny)
    "$PYTHON" -m "examples.$NAME.make_task" --output "$data" ${model[@]+"${model[@]}"}
}

# train RUN_NAME [options of train.py …]
train() {
    local name=$1
    shift
    files
    local command=(${LAUNCH[@]+"${LAUNCH[@]}"} "$PYTHON" "${ENTRY:-train.py}" --config "examples/$NAME/config.yaml" --hf-checkpoint "${checkpoint:-$data/tiny}"
        "${FILES[@]}" --outputs-dir "$outputs" --run-name "$name" "$@" ${passed[@]+"${passed[@]}"})
    echo "running: ${command[*]}"
    "${command[@]}" || fail "${ENTRY:-train.py} ended with the status $?: the reason is above, all logs are in $outputs/$name"
}

files() { FILES=(--prompt-data "$data/train.jsonl"); }
report() { "$PYTHON" -m "examples.$NAME.report" "$1"; }
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; }
fail() { echo "error: $*" >&2; exit 1; }
