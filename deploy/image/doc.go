// SPDX-License-Identifier: Apache-2.0

// Command image packs the two binaries into a container image for several
// architectures, as an OCI archive, without a registry, a daemon or a base image.
//
// The image holds the binaries and nothing else: no shell, no library, no
// certificates. With --iptables it also has both variants of iptables with what
// they load, from Debian packages that apt-get verifies.
//
// Its entrypoint is the reconciler with --agent-config-dir=/etc/config, where the
// agents have their ConfigMap; a container's args are its commands and flags, those
// of either agent's DaemonSet as they are.
package main
