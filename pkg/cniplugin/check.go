// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// check compares every rule with the documents and writes nothing. It reports a difference only if a second
// observation has it too, with the lock held. If another process holds the lock for too long, the second
// one has none: a CHECK does not fail because of that process.
func (n *node) check(ctx context.Context, args *skel.CmdArgs) error {
	conf := n.findNetconf()
	if _, err := n.validEntry(conf); err != nil {
		return err
	}
	prevResult, _, _ := n.result() // CHECK needs no prevResult
	pod := podOf(n.attachment(args), args.Args, podinfo.Networks(prevResult, args.IfName))
	if conf.stdinDiffers {
		pod.Addresses = nil // as in its ADD
	}
	if n.verify(ctx, pod) == nil {
		return nil
	}
	lock, err := n.Dir.LockToRead(ctx)
	n.Warn(err)
	defer func() { n.Warn(lock.Release()) }()
	err = n.verify(ctx, pod)
	if errors.Is(err, store.ErrRefused) { // no rule was compared
		return err
	}
	return withCode(codeDrift, err)
}

// verify returns how the rules differ from what the documents ask for, and that the pod is not exempt
// although its namespace is. Beside a file of a newer version it verifies nothing: what that asks for is
// not known.
func (n *node) verify(ctx context.Context, pod store.Pod) error {
	state, err := n.Dir.Load()
	if err != nil {
		return err
	}
	n.warnUnreadable(state)
	if slices.ContainsFunc(state.Unreadable, store.FileError.IsNewer) {
		return nil
	}
	if state.Find(n.source()) == nil {
		isMissing := fmt.Errorf("network %s has no document in %s that can be read",
			policy.Quote(n.network), n.Dir.Path())
		return errors.Join(n.CheckDataDir(ctx), isMissing)
	}
	asStored := enforce.Proposal{Sources: state.Sources, Lost: n.Dir.Lost(state, n.source())}
	s := n.ObserveProposal(ctx, &asStored, state.Record)
	for _, p := range s.Policies() {
		var drift *enforce.DriftError
		if err := n.errUnlessNewer(s, p.Chain); err != nil && !errors.As(err, &drift) {
			return err
		}
	}
	d := s.Diff()
	for _, o := range s.Stale {
		d = append(d, policy.Change{
			Kind: policy.ChainChange, Family: o.Family, Chain: o.Chain, Unexpected: true,
		})
	}
	if len(d) > 0 {
		return &enforce.DriftError{Diff: d}
	}
	return notExempt(s, pod)
}

// notExempt returns that the pod is in one of nonMasqueradeNamespaces and not exempt, or nil.
func notExempt(s *enforce.State, pod store.Pod) error {
	for _, p := range s.Policies() {
		if !exempts(&p, pod.Namespace) {
			continue
		}
		for _, a := range pod.Addresses {
			family := policy.FamilyOf(a)
			isManaged := slices.Contains(p.Families(), family)
			if isManaged && !p.SourcesExempt(family).Contains(a) {
				return fmt.Errorf("chain %s does not exempt %s, whose pod is in one of "+
					"nonMasqueradeNamespaces: the attachment has no record of it, or another one has "+
					"the address; recreate the pod", p.Chain, a)
			}
		}
	}
	return nil
}

// exempts reports whether a policy exempts the pods of a namespace.
func exempts(p *policy.Policy, namespace string) bool {
	for _, x := range p.Namespaces {
		if x.Name == namespace {
			return true
		}
	}
	return false
}
