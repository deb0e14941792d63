#!/bin/bash
# 1xa100-1rank on sol: written by orchestrate. Job name, array range and dependency
# are arguments of sbatch, which override the lines below.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:a100:1
#SBATCH --mem=48G
#SBATCH --time=0-01:00:00
#SBATCH --partition=htc
#SBATCH --qos=public
#SBATCH --output=/scratch/me/study/runs/jobs/slurm-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --export=NONE
#SBATCH --no-requeue
#SBATCH --signal=USR2@90

fail() { # exit code, message
    printf 'orchestrate: %s (on %s)\n' "$2" "${SLURMD_NODENAME:-$HOSTNAME}" >&2
    exit "$1"
}

# With --export=NONE, PATH may be unset, and srun passes no variables to the ranks (man sbatch, SLURM_EXPORT_ENV).
export PATH="${PATH:+$PATH:}"/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin
export SLURM_EXPORT_ENV=ALL

export SUBMITIT_EXECUTOR=slurm
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=12
export HF_HUB_OFFLINE=1
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export SRUN_CPUS_PER_TASK=12

python=/scratch/me/env/bin/python
[ -x "$python" ] || fail 91 "no interpreter $python here: is it on a disk that compute nodes see?"
command -v srun >/dev/null || fail 92 "no srun on PATH: set slurm_bin in the cluster file"

# The submitted code comes first on Python's path; each run checks that it imports this code.
code=/scratch/me/study/runs/jobs/"$SLURM_JOB_NAME/code"
if [ -s "$code" ]; then export PYTHONPATH="$(<"$code")${PYTHONPATH:+:$PYTHONPATH}"; fi

job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
folder=/scratch/me/study/runs/jobs/"$job"
mkdir -p -- "$folder" || fail 93 "cannot make $folder: is it on a disk that compute nodes see?"
log="$folder/$job${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
# The call is the same for all tasks. It is stored under the job's name, because sbatch assigns the number later.
call=/scratch/me/study/runs/jobs/"$SLURM_JOB_NAME/call.pkl"
# A file of this name may exist where a controller lost its state and assigns job numbers again.
if [ -e "$call" ] && [ ! "$call" -ef "${log}_submitted.pkl" ]; then
    ln -f -- "$call" "${log}_submitted.pkl" 2>/dev/null || cp -- "$call" "${log}_submitted.pkl"
fi
rank=("$python" -u -m submitit.core._submit "$folder")

status=
srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=12 --kill-on-bad-exit=1 --wait=60 --unbuffered \
    --output="${log}_%t_log.out" --error="${log}_%t_log.err" "${rank[@]}"
status=$?
# The launch block of a user's template may leave it unset.
status="${status:-$?}"

exit "$status"
