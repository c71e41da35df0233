#!/bin/bash
# Asks the reconciler whether the node is ready, for the custom plugin monitor of node-problem-detector.
# Exit code 0: ready; 1: not ready, with the reasons on standard output; 2: the reconciler does not answer.
# The argument is the port of /readyz (19820). The script needs hostNetwork, but no root and no mounts.
port=${1:-19820}
if ! { exec 3<>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null; then
	echo "ip-masq-reconciler does not answer at 127.0.0.1:$port"
	exit 2
fi
printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3
read -r _ status _ <&3
while read -r header <&3 && [ "$header" != $'\r' ]; do :; done
case $status in
200) exit 0 ;;
503)
	cat <&3
	exit 1
	;;
esac
echo "/readyz at 127.0.0.1:$port answers with status \"$status\""
exit 2
