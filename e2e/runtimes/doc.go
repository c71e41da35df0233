// SPDX-License-Identifier: Apache-2.0

// Package runtimes tests the plugin and the reconciler under real container runtimes: containerd
// 1.6 (Debian) and 2.4 (built) through CRI, podman 4.3 (Debian), and CRI-O's sequence of calls
// through libcni, because CRI-O itself does not build here. A verdict is the source address that
// the receiver read from a packet, in both families, with UDP and TCP, from a container's first
// packet on. `make e2e-runtimes` runs the tests in about two minutes on two cores, and 90 s more
// to build containerd. They have the build tag e2e_runtimes, need root and the Debian packages that
// the target installs, and fail if something is missing.
package runtimes
