// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// damage is how often rules of a size are changed in each way: rarely enough that the reconciler
// does not detect flapping and back off.
type damage struct {
	prefixes, times int
	quiet           time.Duration // without a commit, after which a repair is over
}

// repair measures how long changed rules stay unrepaired: from right before the commit that changes them
// to the kernel's event of the last commit that repairs them. The kernel sends no events for
// iptables-legacy.
func (b *bench) repair() error {
	sizes := []damage{{usual, 8, 80 * time.Millisecond}, {1000, 4, 150 * time.Millisecond}, {10_000, 3, 300 * time.Millisecond}}
	if b.quick {
		sizes = []damage{{usual, 3, 80 * time.Millisecond}, {10_000, 1, 500 * time.Millisecond}}
	}
	for _, f := range scene.Backends()[:2] {
		for _, size := range sizes {
			if err := b.repairs(f, size); err != nil {
				return err
			}
		}
	}
	return nil
}

// repairs writes the times of repairs by a new reconciler.
func (b *bench) repairs(f scene.Backend, size damage) (err error) {
	g, err := newReconciledNode(f, size.prefixes, "", "--resync-interval", "10m")
	defer func() { err = errors.Join(err, g.close()) }()
	if err != nil {
		return err
	}
	watcher, err := g.Listen()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, watcher.Close()) }()
	for _, perSecond := range []int{0, 100, 400} {
		if err := b.repairsBeside(perSecond, g, watcher, size); err != nil {
			return err
		}
	}
	return nil
}

// repairsBeside writes the times of repairs beside so many third-party commits a second.
func (b *bench) repairsBeside(perSecond int, g reconciledNode, watcher *fixtures.CommitWatcher, size damage) (err error) {
	name := ""
	if perSecond > 0 {
		name = fmt.Sprintf("/beside=%d", perSecond)
		stop, stopped := make(chan struct{}), make(chan error)
		go func() {
			var err error
			for err == nil {
				select {
				case <-stop:
					stopped <- nil
					return
				default:
					_, err = g.CommitMany(perSecond/20, time.Second/time.Duration(perSecond))
				}
			}
			stopped <- err
		}()
		defer func() { close(stop); err = errors.Join(err, <-stopped) }()
	}
	for i := range size.times * scene.Damages {
		took, err := g.Repair(watcher, i, size.quiet)
		if err != nil {
			return err
		}
		benchmark := fmt.Sprintf("Repair/prefixes=%d/backend=%s/damage=%s%s", size.prefixes, g.Backend.Name, scene.DamageName(i), name)
		if err := measure.WriteLine(&b.results, benchmark, wall(took)); err != nil {
			return err
		}
	}
	return nil
}
