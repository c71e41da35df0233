// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// What follows is what scrapes ask for beside the reports of passes.

func (k *keeper) begin(node *reconcile.Node, loop *reconcile.Loop) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.node, k.loop, k.last = node, loop, nil
}

func (k *keeper) publish(node *reconcile.Node, r *reconcile.Report) {
	k.mu.Lock()
	k.last = r
	k.mu.Unlock()
	k.monitor.Report(r, node.Interval(r.Sources))
}

func (k *keeper) now() (*reconcile.Node, *reconcile.Loop, *reconcile.Report) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.node, k.loop, k.last
}

func (k *keeper) view(ctx context.Context) *enforce.State {
	_, loop, _ := k.now()
	return loop.State(ctx)
}

func (k *keeper) foreign(ctx context.Context) (int, error) {
	node, _, last := k.now()
	if last == nil || last.Rules == nil {
		return 0, nil
	}
	rules, err := thirdparty.Scan(ctx, diagnose.Owned(last.Rules, last.State.Record, node.Dir.Path()))
	if err != nil {
		return 0, err
	}
	return diagnose.CountThirdParty(last.Rules.Policies, rules), nil
}

func (k *keeper) written(s policy.SourceID) (time.Time, error) {
	node, _, _ := k.now()
	return node.Dir.Written(s)
}

// installed is the plugin as the runtimes find it. It is asked for its version
// once, and again when it is another file.
type installed struct {
	mu   sync.Mutex
	path string
	file os.FileInfo
	told string
}

func (p *installed) in(dir string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.path, p.file, p.told = filepath.Join(dir, config.PluginType), nil, ""
}

// version returns what the plugin says of itself, or "" where there is none or
// nothing to be learned from it.
func (p *installed) version() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	file, err := os.Stat(p.path)
	if err != nil {
		p.file, p.told = nil, ""
		return ""
	}
	if p.file == nil || !os.SameFile(file, p.file) || !file.ModTime().Equal(p.file.ModTime()) || file.Size() != p.file.Size() {
		p.file = file
		p.told, _ = install.Version(context.Background(), p.path) // "" where there is nothing to be learned
	}
	return p.told
}
