// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// CheckEntry is Node.CheckEntry beside the syncs.
func (l *Loop) CheckEntry(ctx context.Context, list config.Conflist) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Node.CheckEntry(ctx, list)
}

// CheckEntry returns why ADDs would fail with the plugin entry of a conflist that is not written yet, or nil. It asks the
// kernel, and writes nothing.
func (n *Node) CheckEntry(ctx context.Context, list config.Conflist) (err error) {
	src := n.reread(&Sources{})
	src.ConfDir = src.ConfDir.With(list)
	if err := cmp.Or(list.Err, list.Entries[0].Err, src.PluginFileErr, list.DataDirErr(src.PluginFile, n.Dir.Path())); err != nil {
		return err
	}
	e := n.Enforcer(src, func(error) {})
	if err := n.checkDataDir(ctx, e, src); err != nil {
		return err
	}
	lock, err := n.Dir.DryRun(ctx)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, lock.Release()) }()
	state, err := n.Dir.Load()
	if err := cmp.Or(err, newer(state)); err != nil {
		return err
	}
	p := enforce.Proposal{Sources: state.Sources}
	own := policy.Source{ID: policy.SourceID{Kind: policy.Network, Name: list.Network}, Policy: list.Entries[0].Entry.Policy, ConfDir: src.PluginFile.PolicyDir()}
	if err := p.Add(own, func() enforce.Conflists { return src.ConfDir }, func(error) {}); err != nil {
		return err
	}
	s, err := e.Apply(ctx, lock, state, &p)
	if err == nil {
		err = s.Err(own.Policy.Chain)
	}
	return err
}
