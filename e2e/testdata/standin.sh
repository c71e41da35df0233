#!/bin/bash
# Stands in for a program that needs a cluster, systemd, a package manager, a registry or an editor,
# under the program's name. TestDocuments puts it first in PATH. It checks what can be checked here.
set -euo pipefail
real() { PATH=$REST command -v "$1"; }
arguments=$*

# directory fails unless a kustomization of this repository exists. Other names are the reader's own.
directory() { [[ $1 != deploy/* ]] || "$REPOSITORY/bin/deploy/kustomize" build "$1" > /dev/null; }

case ${0##*/} in
kubectl)
  while [ $# -gt 0 ]; do
    case $1 in
    -k | kustomize) directory "$2"; exit ;;
    --) shift && exec "$@" ;;
    -) cat > /dev/null ;;
    esac
    shift
  done
  case $arguments in
  *"get pods -o name"*) echo pod/ip-masq-x7x2k ;;
  *jsonpath*) printf 'nonMasqueradeCIDRs:\n- 10.0.0.0/8\n' ;;
  esac
  ;;
helm)
  if [[ $arguments = *" deploy/chart "* ]]; then
    shift && exec "$REPOSITORY/bin/deploy/helm" template "${@/--reset-then-reuse-values/--dry-run=client}" > /dev/null
  fi
  ;;
systemctl)
  case $arguments in
  *ip-masq-reconciler*)
    case $1 in
    disable | stop | restart)
      if [ -e /run/reconciler.pid ]; then
        kill "$(cat /run/reconciler.pid)" && tail -s 0.05 -f --pid "$(cat /run/reconciler.pid)" /dev/null
        rm /run/reconciler.pid
      fi
      ;;&
    start | enable | restart)
      [ ! -e /run/reconciler.pid ] || exit 0
      ip-masq-reconciler run > /run/reconciler.log 2>&1 3>&- &
      echo $! > /run/reconciler.pid
      for _ in {1..100}; do
        ip-masq-reconciler status > /dev/null 2>&1 && exit
        "$(real sleep)" 0.1
      done
      cat /run/reconciler.log
      exit 1
      ;;
    esac
    ;;
  esac
  ;;
make) exec "$(real make)" -n -C "$REPOSITORY" "$@" > /dev/null ;;
sysctl)
  for name; do
    name=${name%%=*}
    [[ $name = -* || -e /proc/sys/${name//.//} ]] || exit 1
  done
  ;;
sleep) exec "$(real sleep)" 0.2 ;;
grep) "$(real grep)" "$@" || true ;; # there may be nothing to find
esac
