// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// atOnce is the number of concurrent ADDs.
const atOnce = 20

// concurrent runs the verifier this number of times concurrently in a round. The cost is the time until
// the last has ended.
func (v verifier) concurrent(pods int) measure.Contender {
	return measure.Contender{Name: v.name, Run: func(int) ([]measure.Value, error) {
		if err := v.disturb(); err != nil {
			return nil, err
		}
		var requests []scene.Request
		for range pods {
			requests = append(requests, scene.Request{Plugin: v.program, Container: v.node.NextPod()})
		}
		took, err := v.node.RunAtOnce(requests)
		return []measure.Value{wall(took)}, err
	}}
}

// burst measures concurrent ADDs: ip-masq with each number of prefixes, and the alternatives, which take
// long, with the usual number.
func (b *bench) burst() (err error) {
	s, err := newStage()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, at := range b.settings() {
		if err := s.enforce(at.policy); err != nil {
			return err
		}
		concurrent := func(what string, limit measure.Limit, alternatives bool) error {
			var contenders []measure.Contender
			for _, v := range s.verifiers(alternatives) {
				contenders = append(contenders, v.concurrent(atOnce))
			}
			_, err := b.compare(fmt.Sprintf("ConcurrentADDs%s/%s", what, at.name()), limit, contenders...)
			return err
		}
		limit := b.limit(12, 10*time.Second)
		if at.usual() {
			limit = b.limit(60, 45*time.Second) // the budgets use these figures
			if err := concurrent("Alternatives", b.limit(10, 25*time.Second), true); err != nil {
				return err
			}
		}
		if err := concurrent("", limit, false); err != nil {
			return err
		}
	}
	return nil
}
