// SPDX-License-Identifier: Apache-2.0

// Command bench measures what the budgets of docs/benchmarks/README.md limit. It writes the figures of every
// round in the Go benchmark format, for benchstat. Everything that is compared runs in turn on nodes of network
// namespaces. `make bench` builds and runs it. It is a separate module because it pins benchstat.
//
// A measurement is a function in bench.parts that gives contenders to bench.compare, and a row in the
// tables of docs/benchmarks/README.md. Budgets are judged by hand, from what benchstat prints.
package main
