#!/usr/bin/env bash
# Runs on a spot machine until its cloud takes it away, then drains the Ray node (see drain.sh). AWS tells two minutes
# ahead, Google 30 seconds; WAIT_S must leave 8 seconds for Ray. METADATA_URL stands for the machine's metadata service.
# usage: spot_watch.sh aws|gcp [WAIT_S=20]
set -uo pipefail
cloud=${1:?aws or gcp}
here=$(cd "$(dirname "$0")" && pwd)
exec 9> "${TMPDIR:-/tmp}/sevenleague_spot_watch.lock"
flock -n 9 || exit 0 # one watches already

notice() { # succeeds when the machine is about to go
    case $cloud in
        aws)
            url=${METADATA_URL:-http://169.254.169.254}/latest
            token=$(curl -sf --max-time 5 -X PUT "$url/api/token" -H 'X-aws-ec2-metadata-token-ttl-seconds: 60') &&
                curl -sf --max-time 5 -o /dev/null "$url/meta-data/spot/instance-action" \
                    -H "X-aws-ec2-metadata-token: $token"
            ;;
        gcp)
            url=${METADATA_URL:-http://metadata.google.internal}/computeMetadata/v1/instance/preempted
            [ "$(curl -sf --max-time 5 "$url" -H 'Metadata-Flavor: Google')" = TRUE ]
            ;;
        *)
            echo "the cloud must be aws or gcp, got $cloud" >&2
            exit 2
            ;;
    esac
}

until notice; do
    sleep "${POLL_S:-2}"
done
exec "$here/drain.sh" "${2:-20}"
