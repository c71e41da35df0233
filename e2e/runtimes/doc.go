// SPDX-License-Identifier: Apache-2.0

// Package runtimes holds the tests of the plugin and the reconciler under the
// container runtimes that call plugins. `make e2e-runtimes` runs them; they have the
// build tag e2e_runtimes, need root and the Debian packages that the target
// installs, and fail where something is missing.
//
// Its invariant: the runtimes are real, and so is what they run. A verdict is what
// the host at the other side of the wire read from a packet, in both families, UDP
// and TCP, and first of all from the first packets that a container sends.
//
//	containerd 1.6 (Debian), conflist 1.0.0   CRI by crictl; nftables, iptables-nft and -legacy
//	containerd 2.4 (built), conflist 1.1.0    the same, and STATUS
//	podman 4.3 (Debian), conflist 1.0.0       network_backend = "cni"
//	CRI-O's calls, conflist 1.1.0             by libcni in its order: it does not build here
//
// With them: pods that come and go; which calls a runtime makes; our entry added
// while pods run; an entry that is wrong; a backend that is broken and mended; the
// runtime restarted and killed under a pod that sends; a reboot; a main plugin that
// overwrites the conflist fifty times; iptables on the host or in the reconciler's
// image alone; install, and uninstall beside pods.
//
// On two cores it takes about three minutes (158 to 192 s measured), and 90 s more
// when containerd has to be built first. Three quarters of a minute of that is the
// fifty overwrites.
package runtimes
