// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

const (
	stdlib   = "stdlib" // the name of Go's standard library in package URLs
	sbomType = ".spdx.json"

	debianRelease = "12" // from which deploy/image takes packages
)

// module is a Go module that a program is linked with.
type module struct{ name, version string }

// modules returns the modules that programs are linked with, by their build info.
func modules(programs ...string) ([]module, error) {
	used := map[module]bool{}
	for _, program := range programs {
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			return nil, err
		}
		used[module{stdlib, strings.TrimPrefix(info.GoVersion, "go")}] = true
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			used[module{m.Path, m.Version}] = true
		}
	}
	var all []module
	for m := range used {
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b module) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.version, b.version)) })
	return all, nil
}

// writeSBOMs writes an SBOM for each architecture, whose programs are the same in the archive, the
// packages and the images, and one for each image.
func (r *release) writeSBOMs(ctx context.Context) error {
	for _, arch := range r.arches {
		d := r.document(fmt.Sprintf("%s_%s_linux_%s", project, r.number, arch))
		if err := d.addPrograms(r, arch, ""); err != nil {
			return err
		}
		if err := r.writeSBOM(d); err != nil {
			return err
		}
	}
	for _, iptables := range []bool{false, true} {
		name := r.imageFile(iptables)
		image, err := os.ReadFile(filepath.Join(r.next, name))
		if os.IsNotExist(err) && iptables {
			continue
		}
		if err != nil {
			return err
		}
		d := r.document(strings.TrimSuffix(name, ".tar"))
		top := d.add(&v2_3.Package{
			PackageName: r.image, PackageVersion: r.version, PackageFileName: name, PrimaryPackagePurpose: "CONTAINER",
			PackageChecksums: checksum(image), PackageLicenseDeclared: "NOASSERTION",
		}, "", "")
		for _, arch := range r.arches {
			if err := d.addPrograms(r, arch, top); err != nil {
				return err
			}
			if iptables {
				if err := d.addDebianPackages(ctx, r, arch, top); err != nil {
					return err
				}
			}
		}
		if err := r.writeSBOM(d); err != nil {
			return err
		}
	}
	return nil
}

func (r *release) writeSBOM(d *document) error {
	var sums strings.Builder
	for _, p := range d.Packages {
		for _, c := range p.PackageChecksums {
			sums.WriteString(c.Value)
		}
	}
	// Unique for what it describes.
	sum := sha256.Sum256([]byte(sums.String()))
	d.DocumentNamespace = source + "/spdx/" + d.DocumentName + "-" + hex.EncodeToString(sum[:8])
	var out bytes.Buffer
	if err := spdxjson.Write(d.Document, &out, spdxjson.Indent("  "), spdxjson.EscapeHTML(false)); err != nil {
		return err
	}
	return r.write(d.DocumentName+sbomType, out.Bytes())
}

// document is an SBOM.
type document struct{ *v2_3.Document }

func (r *release) document(name string) *document {
	return &document{&v2_3.Document{
		SPDXVersion: v2_3.Version, DataLicense: v2_3.DataLicense, SPDXIdentifier: "DOCUMENT", DocumentName: name,
		CreationInfo: &v2_3.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Organization", Creator: "ip-masq"}, {CreatorType: "Tool", Creator: project + "-release-" + r.number}},
			Created:  r.time.Format(time.RFC3339),
		},
	}}
}

// add adds a package with its relation to another one, or "": the document describes it.
func (d *document) add(p *v2_3.Package, relation string, parent common.ElementID) common.ElementID {
	id := common.ElementID("Package-" + regexp.MustCompile(`[^A-Za-z0-9.]+`).ReplaceAllString(
		strings.Join([]string{p.PackageName, p.PackageVersion, p.PackageFileName}, "-"), "-"))
	if parent == "" {
		relation, parent = "DESCRIBES", "DOCUMENT"
	}
	d.Relationships = append(d.Relationships, &v2_3.Relationship{
		RefA: common.DocElementID{ElementRefID: parent}, RefB: common.DocElementID{ElementRefID: id}, Relationship: relation,
	})
	if slices.ContainsFunc(d.Packages, func(known *v2_3.Package) bool { return known.PackageSPDXIdentifier == id }) {
		return id
	}
	p.PackageSPDXIdentifier, p.PackageLicenseConcluded, p.PackageCopyrightText = id, "NOASSERTION", "NOASSERTION"
	p.PackageDownloadLocation = cmp.Or(p.PackageDownloadLocation, "NOASSERTION")
	p.PackageLicenseDeclared = cmp.Or(p.PackageLicenseDeclared, "NOASSERTION")
	p.PackageSupplier = &common.Supplier{Supplier: "NOASSERTION"}
	if p.PrimaryPackagePurpose != "LIBRARY" {
		p.PackageSupplier = &common.Supplier{SupplierType: "Organization", Supplier: "ip-masq"}
	}
	d.Packages = append(d.Packages, p)
	return id
}

// addPrograms adds the programs for an architecture, and the modules that they are linked with.
func (d *document) addPrograms(r *release, arch string, parent common.ElementID) error {
	for _, path := range r.programsOf(arch) {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name := filepath.Base(path)
		program := d.add(&v2_3.Package{
			PackageName: name, PackageVersion: r.version, PackageFileName: arch + "/" + name, PrimaryPackagePurpose: "APPLICATION",
			PackageChecksums: checksum(data), PackageLicenseDeclared: "Apache-2.0", PackageDownloadLocation: "git+" + source + "@" + r.commit,
			PackageExternalReferences: purl("pkg:golang/github.com/ip-masq/ip-masq-cni@" + r.version + "#" + programs()[name]),
		}, "CONTAINS", parent)
		used, err := modules(path)
		if err != nil {
			return err
		}
		for _, m := range used {
			d.add(&v2_3.Package{
				PackageName: m.name, PackageVersion: m.version, PrimaryPackagePurpose: "LIBRARY",
				PackageExternalReferences: purl("pkg:golang/" + m.name + "@" + m.version),
			}, "DEPENDS_ON", program)
		}
	}
	return nil
}

// addDebianPackages adds the Debian packages from which the image has iptables and its libraries.
func (d *document) addDebianPackages(ctx context.Context, r *release, arch string, parent common.ElementID) error {
	debs, err := filepath.Glob(filepath.Join(r.debs, arch, "*.deb"))
	if err != nil || len(debs) == 0 {
		return fmt.Errorf("no Debian packages in %s: %w", filepath.Join(r.debs, arch), err)
	}
	for _, path := range debs {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		text, err := r.output(ctx, "dpkg-deb", "--show", "--showformat=${Package} ${Version} ${source:Package}", path)
		if err != nil {
			return err
		}
		fields := strings.Fields(text)
		if len(fields) != 3 {
			return fmt.Errorf("%s: package, version and source are %q", path, fields)
		}
		name, version := fields[0], fields[1]
		d.add(&v2_3.Package{
			PackageName: name, PackageVersion: version, PackageFileName: filepath.Base(path), PrimaryPackagePurpose: "LIBRARY",
			PackageChecksums: checksum(data),
			// Advisories of Debian are about a source package in a release of Debian.
			PackageExternalReferences: purl("pkg:deb/debian/" + name + "@" + strings.ReplaceAll(version, "+", "%2B") +
				"?arch=" + arch + "&distro=debian-" + debianRelease + "&upstream=" + strings.ReplaceAll(fields[2], "+", "%2B")),
		}, "CONTAINS", parent)
	}
	return nil
}

func checksum(data []byte) []common.Checksum {
	return []common.Checksum{{Algorithm: common.SHA256, Value: sumOf(data)}}
}

func purl(locator string) []*v2_3.PackageExternalReference {
	return []*v2_3.PackageExternalReference{{Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: locator}}
}

func sumOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
