// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// lockSeconds is how long iptables waits for the lock that all users of
// iptables-legacy on a host share.
const lockSeconds = 5

// programs are the programs of iptables on this host.
type programs struct {
	finder finder
	env    []string

	mu     sync.Mutex
	opened map[[2]string]*program

	known sync.Map // path → asked
}

type asked struct {
	file    os.FileInfo
	variant string
}

func newPrograms(path string) *programs {
	const childPath = "/usr/sbin:/usr/bin:/sbin:/bin"
	return &programs{finder: newFinder(path), env: environment(childPath), opened: map[[2]string]*program{}}
}

// program is iptables or ip6tables in one variant.
type program struct {
	*goiptables.IPTables
	path    string
	restore func(ctx context.Context, input []byte, held *os.File) error
}

func baseName(f policy.Family) string {
	if f == policy.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// open returns the program of the family in the variant. The one that bears the
// variant in its name is preferred, as the plain one may be either.
func (p *programs) open(ctx context.Context, f policy.Family, variant string) (*program, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := [2]string{string(f), variant}
	if o := p.opened[key]; o != nil {
		return o, nil
	}
	path, err := p.locate(ctx, baseName(f), variant, "")
	if err != nil {
		return nil, err
	}
	proto := goiptables.ProtocolIPv4
	if f == policy.IPv6 {
		proto = goiptables.ProtocolIPv6
	}
	ipt, err := goiptables.New(goiptables.Path(path), goiptables.IPFamily(proto), goiptables.Timeout(lockSeconds))
	if err != nil {
		return nil, fmt.Errorf("run %s --version: %w", path, err)
	}
	o := &program{IPTables: ipt, path: path}
	o.restore = func(ctx context.Context, input []byte, held *os.File) error {
		restore, err := p.locate(ctx, baseName(f), variant, "-restore")
		if err != nil {
			return err
		}
		args := []string{"--noflush"}
		// The option came with the same version, 1.6.2, as --random-fully.
		if variant == netfilter.VariantLegacy && ipt.HasRandomFully() {
			args = append(args, "-w", strconv.Itoa(lockSeconds))
		}
		_, err = run(ctx, p.env, held, input, restore, args...)
		return err
	}
	p.opened[key] = o
	return o, nil
}

// locate finds iptables-VARIANT, or a plain iptables that is of the variant;
// with the suffix -restore those programs.
func (p *programs) locate(ctx context.Context, base, variant, suffix string) (string, error) {
	named, plain := base+"-"+variant+suffix, base+suffix
	path, err := p.finder.find(named, plain)
	if err != nil || filepath.Base(path) == named {
		return path, err
	}
	switch has, err := p.variantOf(ctx, path); {
	case err != nil:
		return "", err
	case has != variant:
		return "", fmt.Errorf("find %s: %s is of the %s variant; install the %s one too: %w", named, path, has, variant, fs.ErrNotExist)
	}
	return path, nil
}

// variantOf asks a program which variant it is. One from before 1.8, when there
// was but one, does not say.
func (p *programs) variantOf(ctx context.Context, path string) (string, error) {
	file, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if known, ok := p.known.Load(path); ok {
		if k := known.(asked); os.SameFile(file, k.file) && file.ModTime().Equal(k.file.ModTime()) {
			return k.variant, nil
		}
	}
	variant, err := p.askVariant(ctx, path)
	if err == nil {
		p.known.Store(path, asked{file, variant})
	}
	return variant, err
}

func (p *programs) askVariant(ctx context.Context, path string) (string, error) {
	out, err := run(ctx, p.env, nil, nil, path, "--version")
	if err != nil {
		return "", err
	}
	if strings.Contains(string(out), "(nf_tables)") {
		return netfilter.VariantNFT, nil
	}
	return netfilter.VariantLegacy, nil
}

// plainVariant returns the variant that this host has under the plain name, or
// else the one that it has at all.
func (p *programs) plainVariant(ctx context.Context) (string, error) {
	path, err := p.finder.find("iptables", "iptables-nft", "iptables-legacy")
	if err != nil {
		return "", err
	}
	return p.variantOf(ctx, path)
}

// list runs `iptables -t nat -S CHAIN`. It returns nil for a chain that is not
// there.
func (o *program) list(ctx context.Context, chain string, counters bool) ([]string, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("list chain %s: %w", chain, err)
	}
	list := o.List
	if counters {
		list = o.ListWithCounters
	}
	lines, err := list(natTable, chain)
	if err == nil {
		return lines, nil
	}
	// What a version says of a missing chain differs, and may mean more.
	if chains, errChains := o.ListChains(natTable); errChains == nil && !slices.Contains(chains, chain) {
		return nil, nil
	}
	return nil, o.explain(err)
}

// explain gives the error of a run by go-iptables the form of our own.
func (o *program) explain(err error) error {
	var failed *goiptables.Error
	if !errors.As(err, &failed) {
		return fmt.Errorf("run %s: %w", o.path, err)
	}
	status := fmt.Sprintf("exit status %v", failed.ExitStatus())
	_, said, _ := strings.Cut(failed.Error(), status+": ")
	return &runError{path: o.path, err: errors.New(status), stderr: firstLines(said)}
}
