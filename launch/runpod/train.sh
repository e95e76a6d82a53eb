#!/usr/bin/env bash
# One training on a RunPod Instant Cluster: run this on every node, by hand or as the pods' start command.
#
#   launch/runpod/train.sh
#   CONFIG_FILE=accelerate_configs/ddp.yaml launch/runpod/train.sh \
#       recipes/ddp/train.py --config recipes/ddp/qwen3-1.7b-full.yaml
#
# When: an Instant Cluster; RunPod sets the variables below on each of its nodes. A single pod needs no launch file.
# https://docs.runpod.io/instant-clusters/configuration
# Edit: output_dir (--output_dir, or in the YAML) must be on a network volume that all nodes mount, for instance
# /workspace: a node's own disk is lost with the node.
# It has not run on RunPod: the tests run it with the variables of that page.
# RunPod stops a pod with SIGTERM and seconds later SIGKILL, which can be too short to save: set --save_minutes to the
# minutes of work that you can afford to lose.
set -euo pipefail

fail() {
  echo "train.sh: error: $1" >&2
  exit 2
}

MAIN_IP=${PRIMARY_ADDR:-${MASTER_ADDR:-}}
MAIN_PORT=${PRIMARY_PORT:-${MASTER_PORT:-}}
[[ -n $MAIN_IP ]] || fail "PRIMARY_ADDR is not set: RunPod sets it on the nodes of an Instant Cluster"
[[ -n $MAIN_PORT ]] || fail "PRIMARY_PORT is not set: RunPod sets it on the nodes of an Instant Cluster"
for name in NODE_RANK NUM_NODES NUM_TRAINERS; do
  [[ -n ${!name:-} ]] || fail "$name is not set: RunPod sets it on the nodes of an Instant Cluster"
done
NODES=$NUM_NODES
GPUS_PER_NODE=$NUM_TRAINERS
export MAIN_IP MAIN_PORT NODE_RANK NODES GPUS_PER_NODE

# ens1 is the interface of PRIMARY_ADDR; eth0 leads to the internet, and connections between nodes time out on it.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-ens1}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-ens1}

exec "$(dirname "${BASH_SOURCE[0]}")/../multinode/accelerate.sh" "$@"
