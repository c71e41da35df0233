# Runs one block of the documents on a node of its own, in new network and mount namespaces: the node
# of README.md's block for cnitool, with ip-masq installed, one pod, and a reconciler.
# Arguments: the commands that make the node, those that precede the block, and the block.
set -euo pipefail
mount -t tmpfs -o mode=755 none /run
for directory in /etc/ip-masq /etc/modules-load.d /etc/systemd/system /usr/local/bin; do
  mkdir -p "$directory"
  mount -t tmpfs -o mode=755 none "$directory"
done
exec 3>&1 > /run/before.log 2>&1
trap 'cat /run/before.log >&3' EXIT

# entry KEYS: changes the plugin entry and applies it.
entry() {
  systemctl stop ip-masq-reconciler
  echo "{\"type\": \"ip-masq\", $1}" > /etc/ip-masq/entry.json
  ip-masq-reconciler uninstall --keep-rules
  ip-masq-reconciler install
  systemctl start ip-masq-reconciler
}

eval "$1"
echo '# settings' > /etc/ip-masq/reconciler.toml
echo '{"type": "ip-masq", "nonMasqueradeCIDRs": ["10.0.0.0/8"]}' > /etc/ip-masq/entry.json
ip-masq-reconciler install
ip netns add pod1
CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d cnitool add podnet /run/netns/pod1
rm -r /var/lib/cni/results # containerd keeps no results
systemctl start ip-masq-reconciler
eval "$2"
exec >&3 2>&1 3>&-
trap 'kill $(cat /run/reconciler.pid 2> /dev/null) 2> /dev/null || true' EXIT
timeout 60 bash -euo pipefail -c "$3"
