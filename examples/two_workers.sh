#!/usr/bin/env bash
# Two workers on this machine, as each would be started on a machine of its own.
#
#     bash examples/two_workers.sh runs/two_workers
#
# trains the digits for two epochs; worker 0 is the chief and prints, worker 1 is silent.
# On real machines, put their addresses into TF_CONFIG and start one command on each.
set -euo pipefail

run_dir=${1:-runs/two_workers}
workers='["127.0.0.1:22221", "127.0.0.1:22222"]'

start() {
    TF_CONFIG="{\"cluster\": {\"worker\": $workers}, \"task\": {\"type\": \"worker\", \"index\": $1}}" \
        python -m tfmulti.fit --epochs 2 --run_dir "$run_dir"
}

start 1 &
start 0
wait
