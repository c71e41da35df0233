// SPDX-License-Identifier: Apache-2.0

// Command bench measures the cost of ip-masq and of its alternatives. It writes the figures of every
// round in the Go benchmark format, for benchstat, and two pictures. Everything that is compared runs in
// turn on nodes of network namespaces. `make bench` builds and runs it. It is a separate module because
// of its plotting dependencies.
//
// A measurement is a function in bench.parts that gives contenders to bench.compare, and a row in the
// tables of docs/benchmarks/README.md. Budgets are judged by hand, from what benchstat prints.
package main
