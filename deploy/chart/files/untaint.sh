#!/bin/sh
# Takes TAINT from nodes on which a pod with the labels SELECTOR is ready, again and again. What fails
# is tried again.
set -u
taint=${TAINT:?} selector=${SELECTOR:?} namespace=${NAMESPACE:?} seconds=${SECONDS_BETWEEN:?}
tainted='{{range .items}}{{$name := .metadata.name}}{{range .spec.taints}}{{if eq .key "'$taint'"}}{{$name}} {{end}}{{end}}{{end}}'
readiness='{.items[*].status.conditions[?(@.type=="Ready")].status}'

trap 'exit 0' TERM
while :; do
	for node in $(kubectl get nodes -o "go-template=$tainted"); do
		ready=$(kubectl get pods -n "$namespace" -l "$selector" --field-selector "spec.nodeName=$node" -o "jsonpath=$readiness")
		case " $ready " in
		*" True "*) kubectl taint nodes "$node" "$taint-" ;;
		esac
	done
	sleep "$seconds" &
	wait $!
done
