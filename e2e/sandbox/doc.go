// SPDX-License-Identifier: Apache-2.0

// Package sandbox runs a process in its own network and mount namespaces, for tests and the demo:
// nothing that the process does to network interfaces, netfilter, or files below /run, /etc, /opt
// and /var/lib is visible outside or outlives it. Inside, /run, /etc/cni, /etc/ip-masq, /opt/cni
// and /var/lib/cni are empty and writable, the loopback interface is up, the user is root, and PATH
// has the sbin directories. It needs root or an unprivileged user namespace, in which root is the
// only user. Without either it returns an error; it never runs anything in the machine's own
// network namespace and never skips a test. testutils.NewNS of containernetworking/plugins mounts each
// namespace below the machine's /run/netns instead, where a test that is killed leaves it.
package sandbox
