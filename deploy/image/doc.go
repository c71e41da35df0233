// SPDX-License-Identifier: Apache-2.0

// Command image packs the two binaries into a multi-architecture container image, as an OCI
// archive, without a registry, a daemon or a base image. The image has only the binaries; with
// --iptables also both variants of iptables with their libraries, from Debian packages that apt-get
// verifies. Its entrypoint is the reconciler with --agent-config-dir=/etc/config, the mount path of
// the agents' ConfigMap; a container's args are commands and flags of the reconciler or of either
// agent.
package main
