// SPDX-License-Identifier: Apache-2.0

// Command bench measures what ip-masq costs, side by side with what else there
// is, and writes docs/benchmarks/README.md with the plots beside it, and the
// figures of docs/scale.md. `make bench` builds and runs it.
//
// What it owns is that no figure in those documents was written by hand, and
// that no verdict rests on a bare time: all that is compared was run in turn, on
// nodes made of network namespaces, and ratios are given with their spread.
//
// It is a module of its own, for what it draws with is no business of those who
// build ip-masq.
package main
