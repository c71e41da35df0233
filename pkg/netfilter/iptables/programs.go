// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

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

	mu       sync.Mutex
	opened   map[[2]string]*program // by family and variant
	variants map[string]fileVariant // by path
}

// fileVariant is the variant that a program said it is.
type fileVariant struct {
	file    os.FileInfo
	variant string
}

func newPrograms(path string) *programs {
	const childPath = "/usr/sbin:/usr/bin:/sbin:/bin"
	return &programs{
		finder: newFinder(path), env: environment(childPath),
		opened: map[[2]string]*program{}, variants: map[string]fileVariant{},
	}
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

// open returns the program of a family and variant.
func (p *programs) open(ctx context.Context, f policy.Family, variant string) (*program, error) {
	p.mu.Lock()
	opened := p.opened[[2]string{string(f), variant}]
	p.mu.Unlock()
	if opened != nil {
		return opened, nil
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
	opened = &program{IPTables: ipt, path: path}
	opened.restore = func(ctx context.Context, input []byte, held *os.File) error {
		restore, err := p.locate(ctx, baseName(f), variant, "-restore")
		if err != nil {
			return err
		}
		args := []string{"--noflush"}
		// iptables-restore has -w since 1.6.2, as --random-fully.
		if variant == netfilter.VariantLegacy && ipt.HasRandomFully() {
			args = append(args, "-w", strconv.Itoa(lockSeconds))
		}
		_, err = run(ctx, p.env, held, input, restore, args...)
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.opened[[2]string{string(f), variant}] = opened
	return opened, nil
}

// locate finds iptables-VARIANT, or a plain iptables of the variant; with the
// suffix -restore those programs.
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

// plainVariant returns the variant of the program that is called iptables, or else
// of one that is called by its variant.
func (p *programs) plainVariant(ctx context.Context) (string, error) {
	path, err := p.finder.find("iptables", "iptables-nft", "iptables-legacy")
	if err != nil {
		return "", err
	}
	return p.variantOf(ctx, path)
}

// variantOf runs a program to learn its variant, once as long as the file is the
// same. Versions before 1.8, all legacy, do not print it.
func (p *programs) variantOf(ctx context.Context, path string) (string, error) {
	file, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if k, ok := p.variants[path]; ok && os.SameFile(file, k.file) && file.ModTime().Equal(k.file.ModTime()) {
		return k.variant, nil
	}
	out, err := run(ctx, p.env, nil, nil, path, "--version")
	if err != nil {
		return "", err
	}
	variant := netfilter.VariantLegacy
	if bytes.Contains(out, []byte("(nf_tables)")) {
		variant = netfilter.VariantNFT
	}
	p.variants[path] = fileVariant{file, variant}
	return variant, nil
}

// list runs `iptables -t nat -S CHAIN` and returns the rules.
func (p *program) list(ctx context.Context, chain string) ([]string, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("list chain %s: %w", chain, err)
	}
	lines, err := p.List(natTable, chain)
	var failed *goiptables.Error
	switch {
	case err == nil:
		return ruleLines(lines), nil
	case !errors.As(err, &failed):
		return nil, fmt.Errorf("run %s: %w", p.path, err)
	}
	status := fmt.Sprintf("exit status %v", failed.ExitStatus())
	_, stderr, _ := strings.Cut(failed.Error(), status+": ")
	return nil, &runError{path: p.path, err: errors.New(status), stderr: firstLines(stderr)}
}

// finder looks for programs in the directories of a PATH that only root can write:
// a program that it finds runs with all privileges of a container runtime.
type finder struct {
	path    string // as $PATH
	trusted func(uid uint32) bool
}

func newFinder(path string) finder {
	owner := sync.OnceValue(func() func(uint32) bool { // most ADDs run no program
		return trustedOwner(os.Geteuid(), "/proc/self/uid_map", "/proc/sys/kernel/overflowuid")
	})
	return finder{path: path, trusted: func(uid uint32) bool { return owner()(uid) }}
}

// notFoundError says which programs were looked for, and where.
type notFoundError string

func (e notFoundError) Error() string { return string(e) }

func (e notFoundError) Is(target error) bool { return target == fs.ErrNotExist }

// find returns the absolute path of the first of the names that exists: it searches
// all of PATH for the first name, then for the second.
func (f finder) find(names ...string) (string, error) {
	var dirs, searched, skipped []string
	for _, dir := range filepath.SplitList(f.path) {
		switch info, err := f.resolve(dir); {
		case !filepath.IsAbs(dir):
			skipped = append(skipped, strconv.Quote(dir)+" (not absolute)")
		case errors.Is(err, fs.ErrNotExist):
			searched = append(searched, dir+" (absent)")
		case err != nil:
			skipped = append(skipped, err.Error())
		case !info.IsDir():
			skipped = append(skipped, dir+" (no directory)")
		case writableByOthers(info):
			skipped = append(skipped, dir+" (writable by others)")
		default:
			dirs = append(dirs, dir)
			searched = append(searched, dir)
		}
	}
	for _, name := range names {
		for _, dir := range dirs {
			path := filepath.Join(dir, name)
			switch info, err := f.resolve(path); {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				skipped = append(skipped, err.Error())
			case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
				skipped = append(skipped, path+" (no program)")
			case writableByOthers(info):
				skipped = append(skipped, path+" (writable by others)")
			default:
				return path, nil
			}
		}
	}
	where := "it names no directory to search"
	if len(searched) > 0 {
		where = "searched " + strings.Join(searched, ", ")
	}
	if len(skipped) > 0 {
		where += "; passed over " + strings.Join(skipped, ", ")
	}
	return "", notFoundError(fmt.Sprintf(
		"find %s: not found; install iptables, or add the directory that holds it (often /usr/sbin) to PATH; %s",
		strings.Join(names, " or "), where))
}

// resolve returns the file that an absolute path leads to after all symbolic links.
// It fails if another user could make the path lead elsewhere: if that user owns a
// directory or link on the way or the file itself, or can write a directory on the
// way. A sticky directory that all can write is safe: nobody can replace the entries
// of others there.
func (f finder) resolve(path string) (fs.FileInfo, error) {
	const maxLinks = 40 // as in the kernel, path_resolution(7)
	at, links := "/", 0 // at has no links in it
	info, err := f.lstat(at)
	for rest := strings.Split(path, "/"); err == nil && len(rest) > 0; {
		if info.IsDir() && writableByOthers(info) && info.Mode()&fs.ModeSticky == 0 {
			return nil, fmt.Errorf("%s (writable by others)", at)
		}
		next := filepath.Join(at, rest[0])
		rest = rest[1:]
		if info, err = f.lstat(next); err != nil {
			return nil, err
		}
		if info.Mode().Type() != fs.ModeSymlink {
			at = next
			continue
		}
		target, err := os.Readlink(next)
		if err != nil {
			return nil, err
		}
		if links++; links > maxLinks {
			return nil, &fs.PathError{Op: "resolve", Path: path, Err: syscall.ELOOP}
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
		if info, err = f.lstat(at); err != nil {
			return nil, err
		}
	}
	return info, err
}

// lstat fails for a file that a user who is not trusted owns.
func (f finder) lstat(path string) (fs.FileInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || !f.trusted(st.Uid) {
		return nil, fmt.Errorf("%s (not owned by root)", path)
	}
	return info, nil
}

func writableByOthers(info fs.FileInfo) bool { return info.Mode().Perm()&0o022 != 0 }

// trustedOwner returns whether the files of a user may be run: those of root and of
// this process. In a user namespace the host's root appears as the overflow user,
// as do all users that are not mapped. There that user is taken for root: such a
// process has no privilege on the host that another user could gain. In the first
// user namespace the overflow user is an ordinary one.
func trustedOwner(euid int, uidMap, overflow string) func(uint32) bool {
	nobody := int64(-1)
	if m, err := os.ReadFile(uidMap); err == nil && !mapsEverybody(m) {
		if text, err := os.ReadFile(overflow); err == nil {
			if n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64); err == nil {
				nobody = n
			}
		}
	}
	return func(uid uint32) bool {
		return uid == 0 || int64(uid) == int64(euid) || int64(uid) == nobody
	}
}

// mapsEverybody reports whether a uid_map is that of the first user namespace.
func mapsEverybody(m []byte) bool {
	return strings.Join(strings.Fields(string(m)), " ") == "0 0 4294967295"
}
