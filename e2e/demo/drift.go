// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// until waits until a condition holds.
func until(what string, isSo func() bool) error {
	const most = 5 * time.Second
	for start := time.Now(); !isSo(); time.Sleep(time.Millisecond) {
		if time.Since(start) > most {
			return fmt.Errorf("not within %s: %s", most, what)
		}
	}
	return nil
}

func (s *stage) drift() (err error) {
	s.title("5. Another program flushes the ruleset")
	bin, err := topology.BinDir()
	if err != nil {
		return err
	}
	reconciler := filepath.Join(bin, "ip-masq-reconciler")
	s.say("The plugin restores the rules with the next pod. The reconciler restores them at once.")
	fmt.Println("  ip-masq-reconciler run --cni-bin-dir bin &")
	run := s.top.Node.Command(s.ctx, reconciler, "run", "--cni-bin-dir", bin)
	if err := run.Start(); err != nil {
		return fmt.Errorf("start %s: %w", reconciler, err)
	}
	defer func() { err = errors.Join(err, run.Process.Signal(syscall.SIGTERM), run.Wait()) }()
	ready := func() bool { return s.top.Node.Command(s.ctx, reconciler, "status").Run() == nil }
	if err := until("the reconciler is ready", ready); err != nil {
		return err
	}
	fmt.Println("  nft flush ruleset")
	if err := s.top.Node.Command(s.ctx, "nft", "flush", "ruleset").Run(); err != nil {
		return fmt.Errorf("nft flush ruleset: %w", err)
	}
	flushed := time.Now()
	list := func() bool {
		return s.top.Node.Command(s.ctx, "nft", "list", "chain", "ip", "ip-masq", "masq-IP-MASQ-AGENT").Run() == nil
	}
	if err := until("the rules are back", list); err != nil {
		return err
	}
	fmt.Printf("\n  The rules were seen again after %d ms.\n", time.Since(flushed).Milliseconds())
	if err := s.ask("pod-4", lanServer, internet, s.pods["pod-2"].addr); err != nil {
		return err
	}
	return s.show(reconciler, "explain", lanServer.String())
}
