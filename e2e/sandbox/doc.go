// SPDX-License-Identifier: Apache-2.0

// Package sandbox runs a process where it can do no harm: in a network
// namespace of its own and on directories of its own.
//
// What it owns is this invariant: nothing that a process does inside, to
// network interfaces, to netfilter, or below /run, /etc, /opt and /var/lib, is
// seen outside or outlives it. It needs root or, where the kernel allows them,
// an unprivileged user namespace. Where it has neither it fails; it never runs
// anything in the machine's own network namespace, and never skips.
//
// Inside, /run, /etc/cni, /etc/ip-masq, /opt/cni and /var/lib/cni are empty
// and writable, the loopback interface is up, the user is root and PATH names
// the sbin directories. In a user namespace one user exists, root; files of
// others can be read there, not given away.
//
// Only tests and the demo may import it.
package sandbox
