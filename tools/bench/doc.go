// SPDX-License-Identifier: Apache-2.0

// Command bench measures the cost of ip-masq and of its alternatives and writes
// docs/benchmarks/README.md with its plots and the figures of docs/scale.md. `make bench` builds
// and runs it. No figure in those documents is written by hand. Everything that is compared runs in
// turn on nodes of network namespaces, and ratios are given with their spread. It is a separate
// module because of its plotting dependencies.
package main
