#!/bin/bash
# Written by `python -m pipeline submit slurm`, from launch.slurm in params.yaml.
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ slurm.nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH {{ "--exclusive" if slurm.cpus is none else "--cpus-per-task=%d" % slurm.cpus }}
{% if slurm.gpus %}
#SBATCH --gpus-per-node={{ slurm.gpus }}
{% endif %}
{% for option in ("time", "partition", "account") if slurm[option] %}
#SBATCH --{{ option }}={{ slurm[option] }}
{% endfor %}
{% for option in slurm.options %}
#SBATCH {{ option }}
{% endfor %}
#SBATCH --output={{ folder }}/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --dependency=singleton
#SBATCH --signal=B:USR1@120

code={{ folder }}/$SLURM_JOB_NAME-$SLURM_JOB_ID.code
rm -f "$code"
trap 'echo $? >"$code.partial"; mv "$code.partial" "$code"' EXIT
# Slurm ends all processes of a job that it puts back into the queue. This shell stays until the command has ended, because
# Slurm kills what outlives the shell, such as a training that writes its checkpoint.
trap '[ "${SLURM_RESTART_COUNT:-0}" -ge {{ slurm.restarts }} ] || scontrol requeue "$SLURM_JOB_ID"' USR1
trap : TERM

set -e
export PATH={{ quoted(path) }}:$PATH
{% for name, value in slurm.environment.items() %}
export {{ name }}={{ quoted(value) }}
{% endfor %}
{% for line in slurm.setup %}
{{ line }}
{% endfor %}
set +e

{% if not slurm.container %}
{% set inside = "" %}
{% elif slurm.runtime == "apptainer" %}
{% set inside = 'apptainer exec %s--bind="$PWD" --pwd="$PWD" %s ' % ("--nv " if slurm.gpus else "", quoted(slurm.container)) %}
{% else %}
{% set inside = 'srun --ntasks=1 --container-image=%s --container-mounts="$PWD:$PWD" --container-workdir="$PWD" ' % quoted(slurm.container) %}
{% endif %}
python -m pipeline submit here -- {{ inside }}{{ command }} &
command=$!
while kill -0 $command 2>/dev/null; do wait $command; done
wait $command
