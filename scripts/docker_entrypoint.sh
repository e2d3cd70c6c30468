#!/usr/bin/env bash
# What a container does:
#   head               Ray's first node, until it is stopped          (NODE_IP: its address; PORT: 6379)
#   worker HEAD:PORT   another node of that cluster                   (NODE_IP)
#   COMMAND …          anything else is run as it is
set -euo pipefail

readonly ADDRESS=${NODE_IP:-$(hostname -I | awk '{print $1}')}

case ${1:-} in
    head)
        exec ray start --head --node-ip-address "$ADDRESS" --port "${PORT:-6379}" --dashboard-host 127.0.0.1 --block
        ;;
    worker)
        [[ $# -ge 2 ]] || { echo "worker needs the head's address: worker 10.0.0.1:6379" >&2; exit 2; }
        exec ray start --address "$2" --node-ip-address "$ADDRESS" --block
        ;;
    *)
        exec "$@"
        ;;
esac
