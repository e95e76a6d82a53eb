#!/usr/bin/env bash
# One training on a machine of Hugging Face Jobs, or on several as islands, whose output is in a bucket of the hub.
#
#   BUCKET=me/runs IMAGE=registry.example.com/hfscale:0.1.0 launch/huggingface/jobs.sh
#   BUCKET=me/runs IMAGE=… FLAVOR=h200x8 GPUS_PER_NODE=8 CONFIG_FILE=accelerate_configs/ddp.yaml \
#       launch/huggingface/jobs.sh recipes/ddp/train.py --config recipes/ddp/qwen3-1.7b-full.yaml \
#       --output_dir /runs/qwen3-1.7b-full
#   BUCKET=me/runs IMAGE=… ISLANDS=2 HFSCALE_ISLAND_TOKEN=… launch/huggingface/jobs.sh
#
# When: machines with up to 8 GPUs, and an account with Jobs (`hf auth login`). `hf jobs hardware` lists flavors and prices.
# Several machines train as islands (docs/islands.md), which need no folder that all of them see: a bucket is none.
# Edit: nothing. The image is launch/docker/Dockerfile's, in a registry from which Jobs can read. DRY_RUN=1 prints the job.
# It has not run on Jobs, and networks of jobs were read about only: the tests have `hf jobs run --dry-run` read the command.
# `hf jobs uv run` installs a script's requirements from an index, where hfscale is not yet, and not the image's lock file.
#
#   BUCKET          OWNER/NAME of a bucket of the hub; it is mounted as /runs, and --output_dir must lie there
#   IMAGE           the image
#   FLAVOR          the machine (default a100x8)
#   GPUS_PER_NODE   its GPUs (default 8)
#   TIMEOUT         the longest time of an attempt (default 24h); a job that is out of time is killed without a notice
#   ATTEMPTS        starts at most (default 20); each resumes from the newest checkpoint in the bucket
#   CONFIG_FILE     an Accelerate config (default accelerate_configs/fsdp2.yaml)
#   ISLANDS         machines (default 1), a job each; island N writes to island-N in --output_dir
#   NETWORK_GROUP   name of the network of several jobs (default hfscale); another one for each training at the same time
#   HFSCALE_ISLAND_TOKEN   with several: a secret, by which the islands know each other
set -euo pipefail

fail() {
  echo "jobs.sh: error: $1" >&2
  exit 2
}

for name in BUCKET IMAGE; do
  [[ -n ${!name:-} ]] || fail "$name is not set: see the top of $0"
done
[[ $BUCKET =~ ^[^/[:space:]]+/[^/[:space:]]+$ ]] || fail "BUCKET=$BUCKET is not OWNER/NAME"
(($# > 0)) || set -- recipes/sharded/train.py --config recipes/sharded/llama-3.1-8b-full.yaml \
  --output_dir /runs/llama-3.1-8b-full
[[ " $* " =~ \ --output_dir[\ =]/runs/ ]] || fail "--output_dir does not lie in /runs, the only folder that is kept"

options=(--flavor "${FLAVOR:-a100x8}" --timeout "${TIMEOUT:-24h}" --attempts "${ATTEMPTS:-20}")
options+=(--volume "hf://buckets/$BUCKET:/runs" --secrets HF_TOKEN --env HF_HOME=/runs/huggingface)
options+=(--env MAIN_IP=127.0.0.1 --env MAIN_PORT=29500 --env NODE_RANK=0 --env NODES=1)
options+=(--env "GPUS_PER_NODE=${GPUS_PER_NODE:-8}")
options+=(--env "CONFIG_FILE=${CONFIG_FILE:-accelerate_configs/fsdp2.yaml}")
[[ -z ${DRY_RUN:-} ]] || options+=(--dry-run)

# The command replaces the image's entry point, so it names the script again.
script=/workspace/launch/multinode/accelerate.sh
ISLANDS=${ISLANDS:-1}
[[ $ISLANDS =~ ^[1-9][0-9]?$ ]] || fail "ISLANDS=$ISLANDS is not a number from 1 to 99"
((ISLANDS > 1)) || exec "${HF:-hf}" jobs run "${options[@]}" "$IMAGE" "$script" "$@"

[[ -n ${HFSCALE_ISLAND_TOKEN:-} ]] || fail "HFSCALE_ISLAND_TOKEN is not set: see the top of $0"
[[ " $* " =~ \ --output_dir[\ =]([^ ]+) ]]
output=${BASH_REMATCH[1]%/}
options+=(--secrets HFSCALE_ISLAND_TOKEN --network-group "${NETWORK_GROUP:-hfscale}")
[[ -n ${DRY_RUN:-} ]] || options+=(--detach)
# The names of the network are known inside of a job only.
# shellcheck disable=SC2016
meet='exec "$0" "$@" --island_rendezvous "${HF_NETWORK_GROUP_PREFIX}island-0:29600"'
for ((island = 0; island < ISLANDS; island++)); do
  "${HF:-hf}" jobs run "${options[@]}" --network-alias "island-$island" "$IMAGE" bash -c "$meet" "$script" "$@" \
    --islands "$ISLANDS" --island_rank "$island" --output_dir "$output/island-$island"
done
