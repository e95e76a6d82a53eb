#!/usr/bin/env bash
# One training on several machines with `accelerate launch`: run this on every machine, with a different NODE_RANK on each.
#
#   MAIN_IP=10.0.0.1 MAIN_PORT=29500 NODES=2 GPUS_PER_NODE=8 NODE_RANK=0 launch/multinode/accelerate.sh
#   MAIN_IP=10.0.0.1 MAIN_PORT=29500 NODES=2 GPUS_PER_NODE=8 NODE_RANK=1 launch/multinode/accelerate.sh
#
# When: machines you log in to. The files for Slurm, Kubernetes, SkyPilot and RunPod call this script too.
# Edit: nothing. Another script and its flags are arguments, another strategy is CONFIG_FILE:
#
#   … CONFIG_FILE=accelerate_configs/ddp.yaml launch/multinode/accelerate.sh \
#       recipes/ddp/train.py --config recipes/ddp/qwen3-1.7b-full.yaml
#
#   MAIN_IP         address of the machine with NODE_RANK 0, as all others reach it
#   MAIN_PORT       a free port there, the same on all machines
#   NODE_RANK       0 … NODES - 1, each once
#   NODES           machines
#   GPUS_PER_NODE   processes to start on each of them
#   CONFIG_FILE     an Accelerate config (default accelerate_configs/fsdp2.yaml); its own numbers of machines and
#                   processes, rank, address and port are overridden
#   HFSCALE_RUN_TOKEN   on several machines: a secret, the same on all, with which `hfscale run` restarts them together;
#                   without it a failure ends the launch
#   RUN_PORT        another free port on the machine with NODE_RANK 0, where `hfscale run` meets (default MAIN_PORT + 1)
#   PYTHON          interpreter (default python): activate the environment, or name its python
set -euo pipefail

fail() {
  echo "accelerate.sh: error: $1" >&2
  exit 2
}

for name in MAIN_IP MAIN_PORT NODE_RANK NODES GPUS_PER_NODE; do
  [[ -n ${!name:-} ]] || fail "$name is not set: see the top of $0"
done
for name in MAIN_PORT NODE_RANK NODES GPUS_PER_NODE; do
  [[ ${!name} =~ ^(0|[1-9][0-9]{0,5})$ ]] || fail "$name=${!name} is not a number"
done
((MAIN_PORT > 0 && MAIN_PORT < 65536)) || fail "MAIN_PORT=$MAIN_PORT is not a port"
((NODES > 0)) || fail "NODES=0: at least one machine"
((GPUS_PER_NODE > 0)) || fail "GPUS_PER_NODE=0: at least one process"
((NODE_RANK < NODES)) || fail "NODE_RANK=$NODE_RANK: ranks of NODES=$NODES machines are 0 to $((NODES - 1))"

(($# > 0)) || set -- recipes/sharded/train.py --config recipes/sharded/llama-3.1-8b-full.yaml
CONFIG_FILE=${CONFIG_FILE:-accelerate_configs/fsdp2.yaml}
[[ -f $CONFIG_FILE ]] || fail "CONFIG_FILE=$CONFIG_FILE does not exist in $PWD"
[[ $1 == -m || -f $1 ]] || fail "the first argument, $1, is no script in $PWD (nor -m, for a module)"

# How long the workers may take to save after a SIGTERM; PyTorch's default of 30 is short for a sharded checkpoint.
# Whatever stops the launcher (scheduler, container runtime) must wait longer than this.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

# hfscale run starts the launcher again from memory when a process of the training dies (docs/recovery.md).
supervisor=()
if ((NODES == 1)); then
  supervisor=("${PYTHON:-python}" -m hfscale run --)
elif [[ -n ${HFSCALE_RUN_TOKEN:-} ]]; then
  supervisor=("${PYTHON:-python}" -m hfscale run --nodes "$NODES" --node-rank "$NODE_RANK"
    --rendezvous "$MAIN_IP:${RUN_PORT:-$((MAIN_PORT + 1))}" --)
fi

# exec: the supervisor, or the launcher, takes this process's place, so that it receives the signals for the job.
# deepspeed_multinode_launcher: with ZeRO, accelerate's default is to start the other machines itself, over ssh.
exec "${supervisor[@]}" "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/exit_code.py" accelerate launch \
  --config_file "$CONFIG_FILE" \
  --num_machines "$NODES" \
  --machine_rank "$NODE_RANK" \
  --main_process_ip "$MAIN_IP" \
  --main_process_port "$MAIN_PORT" \
  --num_processes "$((NODES * GPUS_PER_NODE))" \
  --deepspeed_multinode_launcher standard \
  "$@"
