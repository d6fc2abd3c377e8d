#!/usr/bin/env bash
# Start Ray on this node: the head where this node has MASTER_ADDR, a worker that joins it everywhere else. Run the same
# line on every node, then the training command on the head, with RAY_ADDRESS as printed.
#
#   NNODES=2 GPUS_PER_NODE=8 MASTER_ADDR=10.0.0.1 SOCKET_IFNAME=eth0 bash examples/ray_start.sh
#
#   NNODES          nodes to wait for on the head (1)
#   GPUS_PER_NODE   CUDA devices of a node; NPUS_PER_NODE: Ascend devices; neither: processors only
#   MASTER_ADDR     address of the head, or a name that means it on every node
#   MASTER_PORT     port of the head (6379)
#   SOCKET_IFNAME   network interface between the nodes; Ray, gloo, NCCL and HCCL use it and no other
#   NODE_ADDR       this node's address, where it is not the first of SOCKET_IFNAME
#   RAY_DASHBOARD   1: dashboard and job server on the head's loopback, for `ray job submit` (needs ray[default])
#   RAY_AUTH_MODE   disabled: anybody who reaches a node's ports may run code there (token: those who hold
#                   ~/.ray/auth_token, which the head makes; copy it to the other nodes, or set RAY_AUTH_TOKEN)
#   WAIT_SECONDS    how long to wait for the head, and on the head for the nodes (300)
set -euo pipefail

NNODES=${NNODES:-1}
MASTER_PORT=${MASTER_PORT:-6379}
WAIT_SECONDS=${WAIT_SECONDS:-300}
fail() { echo "ray_start.sh: $*" >&2; exit 2; }

[ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set: the address of the node that is the head"
[ -z "${GPUS_PER_NODE:-}" ] || [ -z "${NPUS_PER_NODE:-}" ] || fail "set GPUS_PER_NODE or NPUS_PER_NODE, not both"
command -v ray >/dev/null || fail "ray is not installed here: pip install 'verl[ray]'"

# Children of Ray's daemons inherit these.
if [ -n "${SOCKET_IFNAME:-}" ]; then
  export GLOO_SOCKET_IFNAME=$SOCKET_IFNAME NCCL_SOCKET_IFNAME=$SOCKET_IFNAME HCCL_SOCKET_IFNAME=$SOCKET_IFNAME
  export TP_SOCKET_IFNAME=$SOCKET_IFNAME
fi
if [ -n "${NPUS_PER_NODE:-}" ]; then
  export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-600}
  export HCCL_HOST_SOCKET_PORT_RANGE=${HCCL_HOST_SOCKET_PORT_RANGE:-auto}
  export HCCL_NPU_SOCKET_PORT_RANGE=${HCCL_NPU_SOCKET_PORT_RANGE:-auto}
fi
export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
# Ray's daemons listen on all interfaces and run what they are sent: only for those who know the token.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
umask 077
[ ! -f ~/.ray/auth_token ] || chmod 600 ~/.ray/auth_token # Ray itself writes it so that every user can read it
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"

address_of() {
  python3 - "$1" <<'PYTHON'
import socket, sys
try:
    print(socket.getaddrinfo(sys.argv[1], None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
except (OSError, UnicodeError):
    sys.exit(1)
PYTHON
}
head=$MASTER_ADDR
MASTER_ADDR=$(address_of "$head") ||
  fail "MASTER_ADDR=$head means no IPv4 address here; give the head's address, or a name that this node can resolve"
case $head:$MASTER_ADDR in
  127.*) ;;
  *:127.*) # A machine's name often means the loopback on the machine itself.
    [ "$NNODES" = 1 ] || fail "MASTER_ADDR=$head means $MASTER_ADDR here, which no other node reaches; give the head's address"
    MASTER_ADDR=127.0.0.1 ;;
esac
if [ -n "${NODE_ADDR:-}" ]; then
  node=$NODE_ADDR
  NODE_ADDR=$(address_of "$node") || fail "NODE_ADDR=$node means no IPv4 address here; give this node's address"
fi

NODE_ADDR=${NODE_ADDR:-$(python3 - "$MASTER_ADDR" "$MASTER_PORT" "${SOCKET_IFNAME:-}" <<'PYTHON'
import socket, sys
import psutil
master, port, name = sys.argv[1:]
if name:
    found = [a.address for a in psutil.net_if_addrs().get(name, []) if a.family == socket.AF_INET]
    # One interface may have several addresses: the head's own counts first.
    print(master if master in found else found[0] if found else "")
else:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, int(port)))
        print(probe.getsockname()[0])
PYTHON
)}
[ -n "$NODE_ADDR" ] || fail "interface $SOCKET_IFNAME has no IPv4 address here; interfaces: $(ls /sys/class/net | tr '\n' ' ')"

options=(--node-ip-address "$NODE_ADDR" --disable-usage-stats)
[ -z "${GPUS_PER_NODE:-}" ] || options+=(--num-gpus "$GPUS_PER_NODE")
[ -z "${NPUS_PER_NODE:-}" ] || options+=(--resources "{\"NPU\": $NPUS_PER_NODE}")

if [ "$NODE_ADDR" != "$MASTER_ADDR" ]; then
  [ "$RAY_AUTH_MODE" != token ] || ray get-auth-token >/dev/null 2>&1 ||
    fail "no token here: copy ~/.ray/auth_token from the head, or set RAY_AUTH_TOKEN to what it holds"
  end=$((SECONDS + WAIT_SECONDS))
  until (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do
    [ $SECONDS -lt $end ] || fail "no head answers at $MASTER_ADDR:$MASTER_PORT within $WAIT_SECONDS s; start it there first"
    sleep 1
  done
  exec ray start --address "$MASTER_ADDR:$MASTER_PORT" "${options[@]}"
fi

python3 - "$NODE_ADDR" "$MASTER_PORT" <<'PYTHON' || fail "port $MASTER_PORT of $NODE_ADDR is taken; stop what listens there (ray stop), or set MASTER_PORT on all nodes"
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((sys.argv[1], int(sys.argv[2])))
    except OSError:
        sys.exit(1)
PYTHON
[ "$RAY_AUTH_MODE" != token ] || ray get-auth-token --generate >/dev/null
if [ "${RAY_DASHBOARD:-0}" = 1 ]; then
  options+=(--include-dashboard true --dashboard-host 127.0.0.1)
else
  options+=(--include-dashboard false)
fi
ray start --head --port "$MASTER_PORT" "${options[@]}"

python3 - "$MASTER_ADDR:$MASTER_PORT" "$NNODES" "$WAIT_SECONDS" <<'PYTHON' || fail "not all $NNODES nodes came within $WAIT_SECONDS s"
import sys, time
import ray
address, wanted, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
end, shown = time.monotonic() + seconds, -1
while (here := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if here != shown:
        print(f"{here} of {wanted} nodes are here", flush=True)
        shown = here
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(1)
print(f"{here} of {wanted} nodes are here: {ray.cluster_resources()}")
PYTHON
echo "now: RAY_ADDRESS=$MASTER_ADDR:$MASTER_PORT RAY_AUTH_MODE=$RAY_AUTH_MODE python3 -m verl.trainer.main_ppo trainer.nnodes=$NNODES …"
[ "${RAY_DASHBOARD:-0}" != 1 ] || echo "or:  RAY_AUTH_MODE=$RAY_AUTH_MODE ray job submit --runtime-env=verl/trainer/runtime_env.yaml --working-dir . -- python3 -m verl.trainer.main_ppo trainer.nnodes=$NNODES …"
