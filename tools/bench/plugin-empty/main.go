// SPDX-License-Identifier: Apache-2.0

// Command plugin-empty is a chained CNI plugin that passes the result on and
// does nothing else: the floor under what any plugin of this kind costs.
package main

import "github.com/ip-masq/ip-masq-cni/tools/bench/internal/chained"

func main() { chained.Main("plugin-empty", nil) }
