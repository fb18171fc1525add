#!/bin/bash
# Simulates SLURM's commands, selected by the name of this script. Jobs are processes of this machine;
# the state of job N is in $LOFT_JOBS/N.
case "$(basename "$0")" in
sbatch)
  id=1
  until mkdir "$LOFT_JOBS/$id" 2>/dev/null; do id=$((id + 1)); done
  cp "$1" "$LOFT_JOBS/$id/script"
  echo RUNNING >"$LOFT_JOBS/$id/state"
  (
    export SLURM_JOB_ID=$id SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NUM_NODES=1
    while :; do
      if bash "$LOFT_JOBS/$id/script"; then state=COMPLETED; else state=FAILED; fi
      rm "$LOFT_JOBS/$id/requeued" 2>/dev/null || break
    done
    echo $state >"$LOFT_JOBS/$id/state"
  ) >/dev/null 2>&1 &
  echo "Submitted batch job $id"
  ;;
srun)
  out=/dev/null err=/dev/null
  while [[ $1 == --* ]]; do
    case "$1" in
    --output) out=${2//%j/$SLURM_JOB_ID}; shift ;;
    --error) err=${2//%j/$SLURM_JOB_ID}; shift ;;
    esac
    shift
  done
  echo $$ >"$LOFT_JOBS/$SLURM_JOB_ID/step"
  exec setsid "$@" >>"${out//%t/0}" 2>>"${err//%t/0}"
  ;;
sacct)
  echo "JobID|State|NodeList"
  for id in $(ls "$LOFT_JOBS"); do echo "$id|$(cat "$LOFT_JOBS/$id/state")|here"; done
  ;;
scancel)
  name=${1#--signal=}
  kill -s "$name" -- "-$(cat "$LOFT_JOBS/$2/step")"  # signals the processes of the step, as SLURM does
  ;;
scontrol)
  if [[ $1 == show ]]; then
    test -d "$LOFT_JOBS/$3" || exit 1
    echo "JobId=$3 JobName=loft"
    echo "   UserId=me($(id -u)) GroupId=us(7) MCS_label=N/A"
    echo "   StdOut=$(sed -n 's/^#SBATCH --output=//p' "$LOFT_JOBS/$3/script")"
  else
    touch "$LOFT_JOBS/$2/requeued"
  fi
  ;;
esac
