// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/doctor"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/foreign"
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

func (k *keeper) view(ctx context.Context) *enforce.View {
	_, loop, _ := k.now()
	return loop.View(ctx)
}

func (k *keeper) foreign(ctx context.Context) (int, error) {
	node, _, last := k.now()
	if last == nil || last.View == nil {
		return 0, nil
	}
	rules, err := foreign.Scan(ctx, doctor.Owned(last.View, last.State.Record, node.Dir.Path()))
	if err != nil {
		return 0, err
	}
	return doctor.CountForeign(last.View.Policies, rules), nil
}

func (k *keeper) written(s policy.Source) (time.Time, error) {
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
		p.file, p.told = file, ask(p.path)
	}
	return p.told
}

// ask runs the plugin as a person would, without a command: then it tells about
// itself.
func ask(path string) string {
	const most = 2 * time.Second
	ctx, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	var said bytes.Buffer
	c := exec.CommandContext(ctx, path)
	c.Env = []string{}
	c.Stderr = &said
	if err := c.Run(); err != nil {
		return ""
	}
	if found := regexp.MustCompile(`^ip-masq (\S+): `).FindStringSubmatch(said.String()); found != nil {
		return found[1]
	}
	return ""
}
