#!/bin/bash
# Simulates SLURM's commands, selected by the name of this script. Jobs are processes of this machine;
# the state of job N is in $LOFT_JOBS/N.
case "$(basename "$0")" in
sbatch)
  id=1
  until mkdir "$LOFT_JOBS/$id" 2>/dev/null; do id=$((id + 1)); done
  cp "$2" "$LOFT_JOBS/$id/script"
  echo PENDING >"$LOFT_JOBS/$id/state"
  echo 0 >"$LOFT_JOBS/$id/code"
  echo "Submitted batch job $id"
  ;;
srun)
  while [[ $1 == --* ]]; do shift; done
  echo $$ >"$LOFT_JOBS/$SLURM_JOB_ID/step"
  exec setsid "$@"
  ;;
scancel)
  name=${1#--signal=}
  kill -s "$name" -- "-$(cat "$LOFT_JOBS/$2/step")"  # signals the processes of the step, as SLURM does
  ;;
scontrol)
  if [[ "$1 $2" == "show job" ]]; then
    test -d "$LOFT_JOBS/$3" || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
    echo "JobId=$3 JobName=loft"
    echo "   UserId=me($(id -u)) GroupId=us(7) MCS_label=N/A"
    echo "   JobState=$(cat "$LOFT_JOBS/$3/state") Reason=None Dependency=(null)"
    echo "   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=$(cat "$LOFT_JOBS/$3/code"):0"
    echo "   RunTime=1-00:00:07 TimeLimit=01:30:00 TimeMin=N/A"
    echo "   StdOut=$(sed -n 's/^#SBATCH --output=//p' "$LOFT_JOBS/$3/script")"
  elif [[ $1 == release && $(cat "$LOFT_JOBS/$2/state") == PENDING ]]; then
    id=$2
    echo RUNNING >"$LOFT_JOBS/$id/state"
    (
      export SLURM_JOB_ID=$id SLURM_JOB_NUM_NODES=1 SLURM_CPUS_PER_TASK=8
      SLURM_NTASKS_PER_NODE=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' "$LOFT_JOBS/$id/script")
      export SLURM_NTASKS_PER_NODE
      bash "$LOFT_JOBS/$id/script"
      code=$?
      echo $code >"$LOFT_JOBS/$id/code"
      if ((code)); then echo FAILED; else echo COMPLETED; fi >"$LOFT_JOBS/$id/state"
    ) >>"$(sed -n 's/^#SBATCH --output=//p' "$LOFT_JOBS/$id/script")" 2>&1 </dev/null &
  fi
  ;;
esac
