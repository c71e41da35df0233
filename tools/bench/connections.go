// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// connections measures the cost of a new connection to an address that no prefix exempts: without a list, and
// with each backend.
func (b *bench) connections() (err error) {
	backends := scene.Backends()
	names := []string{"no-list"}
	for _, f := range backends {
		names = append(names, ipMasqOn(f))
	}
	var routers []*scene.Node
	defer func() {
		for _, n := range routers {
			err = errors.Join(err, n.Close())
		}
	}()
	for _, f := range append(backends[:1:1], backends...) {
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		routers = append(routers, n)
	}
	if err := enforce(scene.Policy{}, routers[0]); err != nil {
		return err
	}
	for _, count := range b.sizes(usual, 10_000) {
		if err := enforce(scene.Policy{Prefixes: scene.Prefixes(count)}, routers[1:]...); err != nil {
			return err
		}
		var contenders []measure.Contender
		for i, n := range routers {
			contenders = append(contenders, paced("router="+names[i], 30*time.Millisecond, wall, func(flows int) (time.Duration, error) {
				return n.Flood(scene.Elsewhere(), flows)
			}))
		}
		if err := b.compare(fmt.Sprintf("Connection/prefixes=%d", count), b.limit(20, 20*time.Second), contenders...); err != nil {
			return err
		}
	}
	return nil
}
