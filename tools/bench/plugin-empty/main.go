// SPDX-License-Identifier: Apache-2.0

// Command plugin-empty is a chained CNI plugin that only passes the result on: the minimum cost of
// a chained plugin.
package main

import "github.com/ip-masq/ip-masq-cni/tools/bench/internal/chained"

func main() { chained.Main("plugin-empty", func() error { return nil }) }
