r"""Start a training on SageMaker, on one spot machine with eight GPUs.

    python launch/sagemaker/start.py --role arn:aws:iam::123456789012:role/SageMakerTraining \
        --image 123456789012.dkr.ecr.us-east-1.amazonaws.com/hfscale:0.1.0 \
        --checkpoints s3://my-bucket/llama-3.1-8b-full

When: your data, quotas and permissions are at AWS, and one machine is enough: several have no folder in common, so
output_dir would need FSx for Lustre. Edit: the constants below; `--dry-run` prints what becomes of them.
Needs `pip install "sagemaker>=3"` and AWS credentials where boto3 looks for them; none belong into this file.
The image is launch/docker/Dockerfile's, built with `--build-arg RUN_AS=root`: SageMaker's folders belong to root.
Llama is gated, and a token does not belong into a job's description either: copy the model into the image and name its
folder in the YAML, or train an open one.

SageMaker replaces a spot machine that is taken away, copies the checkpoints back from S3 and runs the same command,
which resumes from the newest complete one. After a failure, or to resume later, run this again with the same
--checkpoints. The SDK puts code and logs into the account's default bucket, sagemaker-REGION-ACCOUNT.
It has not run on SageMaker: the types of sagemaker-train 1.27.0 accept what `--dry-run` shows, and the tests start it
with a stand-in for the SDK.
https://docs.aws.amazon.com/sagemaker/latest/dg/model-managed-spot-training.html
"""

import argparse
import json
import sys
from pathlib import Path

INSTANCE_TYPE = "ml.p5.48xlarge"  # 8 x H100-80GB
GPUS = 8
DISK_GB = 1000  # the newest checkpoints (about 100 GB each for 8B parameters), the model and the dataset
TRAINING_HOURS = 48  # SageMaker stops the job then, with a SIGTERM 120 seconds ahead
WAITING_HOURS = 24  # for spot machines, all waits together
CHECKPOINT_DIR = "/opt/ml/checkpoints"  # SageMaker uploads what changes here to --checkpoints, and restores it
REPOSITORY = Path(__file__).resolve().parents[2]

# exec: the launcher takes the place of SageMaker's shell script, so that it receives the SIGTERM. With the SDK's
# distributed=Torchrun() the shell does not pass it on, so nothing is saved, and NCCL_PROTO is forced to `simple`.
COMMAND = f"exec accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes {GPUS}"
SCRIPT = ["recipes/sharded/train.py", "--config", "recipes/sharded/llama-3.1-8b-full.yaml"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a training on SageMaker.", allow_abbrev=False)
    parser.add_argument("--role", required=True, metavar="ARN", help="the role the job runs as")
    parser.add_argument("--image", required=True, metavar="URI", help="the image of launch/docker/Dockerfile, in ECR")
    parser.add_argument("--checkpoints", required=True, metavar="S3_URI", help="where checkpoints are kept")
    parser.add_argument("--name", default="hfscale", help="how the job's name begins (default: hfscale)")
    parser.add_argument("--dry-run", action="store_true", help="print the job and start nothing")
    args = parser.parse_args()
    if not args.checkpoints.startswith("s3://"):
        parser.error(f"--checkpoints {args.checkpoints}: give a folder in S3, s3://BUCKET/NAME")
    job = describe(args)
    if args.dry_run:
        sys.stdout.write(json.dumps(job, indent=2) + "\n")
        return 0
    try:
        from sagemaker.core.shapes import StoppingCondition
        from sagemaker.core.training.configs import CheckpointConfig, Compute, SourceCode
        from sagemaker.train import ModelTrainer
    except ImportError as error:
        sys.stderr.write(f'start.py: error: {error}: pip install "sagemaker>=3", or try --dry-run\n')
        return 1
    trainer = ModelTrainer(
        role=job["role"],
        base_job_name=job["base_job_name"],
        training_image=job["training_image"],
        environment=job["environment"],
        source_code=SourceCode(**job["source_code"]),
        compute=Compute(**job["compute"]),
        stopping_condition=StoppingCondition(**job["stopping_condition"]),
        checkpoint_config=CheckpointConfig(**job["checkpoint_config"]),
    )
    trainer.train(wait=False)
    return 0


def describe(args: argparse.Namespace) -> dict:
    return {
        "role": args.role,
        "base_job_name": args.name,
        "training_image": args.image,
        "environment": {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100",  # seconds the workers have to save, of SageMaker's 120
            "HF_HOME": "/tmp/huggingface",  # noqa: S108  the machine's fast local disk
        },
        "source_code": {
            "source_dir": str(REPOSITORY),
            "command": COMMAND,
            "args": [*SCRIPT, "--output_dir", CHECKPOINT_DIR],
            "ignore_patterns": [".git", ".venv", "runs", "wandb", "__pycache__", ".env", ".cache"],
        },
        "compute": {
            "instance_type": INSTANCE_TYPE,
            "instance_count": 1,
            "volume_size_in_gb": DISK_GB,
            "enable_managed_spot_training": True,
        },
        "stopping_condition": {
            "max_runtime_in_seconds": TRAINING_HOURS * 3600,
            "max_wait_time_in_seconds": (TRAINING_HOURS + WAITING_HOURS) * 3600,
        },
        "checkpoint_config": {"s3_uri": args.checkpoints, "local_path": CHECKPOINT_DIR},
    }


if __name__ == "__main__":
    sys.exit(main())
